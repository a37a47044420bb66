"""Correct ways to write a training loop: no rule finds anything in any of them."""

import pytest
from forms import TEXT, assert_found

MODEL = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long)), batch_size=8, shuffle=True)
"""

HEALTHY = {
    "an optimizer of another module, whose step may clear the gradients": """
from project.optimizers import MasterWeightOptimizer
optimizer = MasterWeightOptimizer(model, lr=0.1)
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a loss that is scaled and then divided": """
scaler = torch.amp.GradScaler("cpu")
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if scaler.is_enabled():
        part = scaler.scale(loss) / 2
    else:
        part = loss / 2
    part.backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "losses of inner steps, in a list of the method that makes the step": """
class Meta:
    def __init__(self):
        self.optimizer = torch.optim.Adam(model.parameters())
    def forward(self, tasks):
        losses = [0 for _ in range(5)]
        for x, y in tasks:
            for k in range(4):
                loss = F.cross_entropy(model(x), y)
                losses[k + 1] += loss
        loss = losses[-1] / 4
        DESCEND self.optimizer loss
meta = Meta()
for epoch in range(3):
    meta.forward(list(loader))
""",
    "a state that a helper fills and returns while the training goes on": """
def averaged(averages):
    state = model.state_dict()
    for name, value in zip(list(state), averages):
        state[name] = value
    return state
averages = [p.detach().clone() for p in model.parameters()]
for epoch in range(3):
    for x, y in loader:
        DESCEND optimizer F.cross_entropy(model(x), y)
    torch.save(averaged(averages), f"average{epoch}.pt")
""",
    "a class of the program in place of the scaler": """
import sys
class NoScaler:
    def scale(self, loss):
        return loss
    def step(self, optimizer):
        optimizer.step()
    def update(self):
        pass
if "--amp" in sys.argv:
    scaler = torch.amp.GradScaler("cuda")
else:
    scaler = NoScaler()
for x, y in loader:
    optimizer.zero_grad()
    scaler.scale(F.cross_entropy(model(x), y)).backward()
    scaler.step(optimizer)
    scaler.update()
""",
    "an evaluation whose losses are differentiated after it": """
for epoch in range(3):
    losses = []
    for x, y in loader:
        DESCEND optimizer F.cross_entropy(model(x), y)
    for x, y in loader:
        losses.append(F.cross_entropy(model(x), y))
    DESCEND optimizer torch.stack(losses).mean()
""",
    "an optimizer for each parameter, which steps in the backward pass": """
each = {p: torch.optim.SGD([{"params": [p]}], lr=0.1) for p in model.parameters()}
for p in each:
    p.register_post_accumulate_grad_hook(lambda p: (each[p].step(), each[p].zero_grad()))
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
""",
    "two networks, three backward passes": """
other = nn.Linear(3, 4)
second = torch.optim.Adam(other.parameters())
for x, y in loader:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    made = other(torch.randn(8, 3))
    F.cross_entropy(model(made.detach()), y).backward()
    optimizer.step()
    other.zero_grad()
    F.cross_entropy(model(made), y).backward()
    second.step()
""",
    "one optimizer steps more rarely": """
other = nn.Linear(3, 4)
second = torch.optim.Adam(other.parameters())
for i, (x, y) in enumerate(loader):
    DESCEND optimizer F.cross_entropy(model(x), y)
    second.zero_grad()
    if i % 5 == 0:
        model(other(torch.randn(8, 3))).mean().backward()
        second.step()
""",
    "a closure": """
lbfgs = torch.optim.LBFGS(model.parameters())
for x, y in loader:
    def closure():
        lbfgs.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss
    lbfgs.step(closure)
""",
    "accumulation in an inner loop": """
batches = iter(loader)
for step in range(10):
    for micro in range(4):
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
""",
    "gradients are set to None by hand": """
for x, y in loader:
    for p in model.parameters():
        p.grad = None
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "a list of optimizers": """
optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
for x, y in loader:
    for o in optimizers:
        o.zero_grad()
    F.cross_entropy(model(x), y).backward()
    for o in optimizers:
        o.step()
""",
    "a total of several losses": """
for x, y in loader:
    total = 0
    for head in range(3):
        loss = F.cross_entropy(model(x), y)
        total += loss
    DESCEND optimizer total
""",
    "a model and an optimizer for each fold": """
for fold in range(5):
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    part = DataLoader(TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long)), batch_size=8)
    for x, y in part:
        DESCEND sgd F.cross_entropy(net(x), y)
""",
    "with and without a scaler": """
import sys
scaler = torch.amp.GradScaler("cuda") if "--amp" in sys.argv else None
for x, y in loader:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    if scaler is not None:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    else:
        loss.backward()
        optimizer.step()
""",
    "a state that is carried over, and detached": """
rnn = nn.LSTM(4, 8)
sgd = torch.optim.SGD(rnn.parameters(), lr=0.1)
state = None
for x, y in loader:
    sgd.zero_grad()
    out, state = rnn(x.unsqueeze(0), state)
    state = tuple(s.detach() for s in state)
    out.mean().backward()
    sgd.step()
""",
    "an average of the weights that is only evaluated": """
average = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
for i, (x, y) in enumerate(loader):
    DESCEND optimizer F.cross_entropy(model(x), y)
    if i % 100 == 0:
        with torch.no_grad():
            average.eval()
            average(x)
""",
    "a new head before the optimizer": """
model[2] = nn.Linear(8, 10)
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.to("cpu")
""",
    "layers in a list that is registered": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Linear(4, 4)]
        layers.append(nn.Linear(4, 4))
        self.net = nn.Sequential(*layers)
        self.sizes = [4, 4]
        self.later = []
        for n in range(2):
            layer = nn.Linear(4, 4)
            self.add_module(f"l{n}", layer)
            self.later.append(layer)
    def forward(self, x):
        return F.dropout(self.net(x), 0.1, self.training)
""",
    "log_softmax before nll_loss, logits before cross_entropy": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)
    def forward(self, x):
        return F.log_softmax(self.fc(x), dim=-1)
net = Net()
for x, y in loader:
    print(F.nll_loss(net(x), y), F.cross_entropy(model(x), y))
""",
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_found(name):
    assert_found(MODEL, "", TEXT, HEALTHY[name], of_all=True)
