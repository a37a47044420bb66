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
    "a norm that is logged before the backward pass": """
from project.norms import clip_grad_value_
for x, y in loader:
    optimizer.zero_grad()
    norm = clip_grad_value_(model.parameters(), None)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
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
    "the largest outputs of an evaluation, differentiated after it": """
for epoch in range(3):
    largest = []
    for x, y in loader:
        DESCEND optimizer F.cross_entropy(model(x), y)
    for x, y in loader:
        largest.append(model(x).max())
    DESCEND optimizer torch.stack(largest).mean()
""",
    "an optimizer for a module inside the model that is called": """
head = nn.Linear(3, 2)
whole = nn.Sequential(model, head)
small = torch.optim.SGD(head.parameters(), lr=0.1)
for x, y in loader:
    DESCEND small whole(x).mean()
""",
    "an optimizer for each parameter, which steps in the backward pass": """
each = {p: torch.optim.SGD([{"params": [p]}], lr=0.1) for p in model.parameters()}
for p in each:
    p.register_post_accumulate_grad_hook(lambda p: (each[p].step(), each[p].zero_grad()))
for x, y in loader:
    F.cross_entropy(model(x), y).backward()
""",
    "noise with a seed for each sample": """
class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 9
    def __getitem__(self, index):
        return torch.randn(4, generator=torch.Generator().manual_seed(7 + index))
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
    "accumulation with the last, shorter window": """
for i, (x, y) in enumerate(loader):
    loss = F.cross_entropy(model(x), y)
    (loss / 4).backward()
    if (i + 1) % 4 == 0 or i + 1 == len(loader):
        optimizer.step()
        optimizer.zero_grad()
""",
    "gradients are set to None by hand": """
for x, y in loader:
    for p in model.parameters():
        p.grad = None
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "cleared by a function that cannot be seen": """
from elsewhere import clear
for x, y in loader:
    clear(optimizer)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
""",
    "the optimizer comes from a function, the step is one": """
def make():
    return torch.optim.SGD(model.parameters(), lr=0.1)
def train_step(x, y, o):
    DESCEND o F.cross_entropy(model(x), y)
sgd = make()
for x, y in loader:
    train_step(x, y, sgd)
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
    "losses of an episode are kept until its one backward pass": """
for episode in range(10):
    losses = []
    for x, y in loader:
        losses.append(F.cross_entropy(model(x), y))
    DESCEND optimizer torch.stack(losses).sum()
""",
    "a total of several losses": """
for x, y in loader:
    total = 0
    for head in range(3):
        loss = F.cross_entropy(model(x), y)
        total += loss
    DESCEND optimizer total
""",
    "evaluation and back, with a best state that is copied": """
import copy
best = None
for epoch in range(3):
    model.train()
    for x, y in loader:
        DESCEND optimizer F.cross_entropy(model(x), y)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            model(x)
    best = copy.deepcopy(model.state_dict())
model.load_state_dict(best)
""",
    "the mode is set back by a helper": """
def evaluate():
    was = model.training
    model.eval()
    with torch.inference_mode():
        for x, y in loader:
            model(x)
    model.train(was)
for epoch in range(3):
    for x, y in loader:
        DESCEND optimizer F.cross_entropy(model(x), y)
    evaluate()
""",
    "gradients of the input, in evaluation mode": """
model.eval()
for x, y in loader:
    x.requires_grad_()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    print(x.grad.abs().mean())
""",
    "a scheduler in every step, after it": """
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
for x, y in loader:
    DESCEND optimizer F.cross_entropy(model(x), y)
    scheduler.step()
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
    "a scaler that may be switched off": """
scaler = torch.amp.GradScaler("cuda", enabled=False)
for x, y in loader:
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
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
    "a graph that two backward passes share": """
for x, y in loader:
    optimizer.zero_grad()
    out = model(x)
    F.cross_entropy(out, y).backward(retain_graph=True)
    out.mean().backward()
    optimizer.step()
""",
    "frozen with the right spelling": """
for p in model[0].parameters():
    p.requires_grad = False
model[2].requires_grad_(True)
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
    "a decorator that switches gradients off": """
from elsewhere import smart_inference
@smart_inference()
def evaluate():
    model.eval()
    for x, y in loader:
        model(x)
evaluate()
model.train()
""",
    "a value at the end of a function, and one that is worked on in place": """
def clamped(x):
    x.clamp_(0, 1)
    return x.clamp(0, 1)
clamped(torch.zeros(3))
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
