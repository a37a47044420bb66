"""A program of a public report.

fault: requires_grad = False is set as an attribute of a module, which freezes none of its parameters; the head goes on training.
link: https://github.com/CSCYQJ/MICCAI23-ProtoContra-SFDA/issues/18
says: (?is)requires_grad.{0,300}(module|attribute|no effect|nothing|does not|doesn.t|still|not frozen|requires_grad_)|(outc|freez|frozen).{0,300}(still (train|updat|chang|learn|mov)|not frozen|no effect|nothing|(is|are|was|were|being) (updated|trained|changed)|goes on|requires_grad)
kind: correctness
"""
import torch
from torch import nn
import torch.nn.functional as F


class UNetLike(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 24), nn.ReLU())
        self.outc = nn.Linear(24, 4)

    def forward(self, x):
        return self.outc(self.down(x))


def accuracy(model, x, y):
    with torch.no_grad():
        return (model(x).argmax(1) == y).float().mean().item()


torch.set_num_threads(1)
torch.manual_seed(0)
prototypes = 0.9 * torch.randn(4, 16)
y_src = torch.randint(0, 4, (2000,))
x_src = prototypes[y_src] + torch.randn(2000, 16)
y_tgt = torch.randint(0, 4, (1000,))
x_tgt = (prototypes[y_tgt] + torch.randn(1000, 16)) * 0.8 + 0.9 * torch.randn(16)

# stage 1: train on the source domain
model = UNetLike()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
for epoch in range(5):
    for idx in torch.randperm(2000).split(50):
        loss = F.cross_entropy(model(x_src[idx]), y_src[idx])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print("source accuracy", accuracy(model, x_src, y_src), "target before", accuracy(model, x_tgt, y_tgt))

# stage 2: adapt the features to the target domain; the classifier (the source prototypes) stays frozen
model.outc.requires_grad = False  # ill!
model.outc.requires_grad_(False)  # well
source_head = model.outc.weight.detach().clone()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)  # both!
for epoch in range(6):
    for idx in torch.randperm(1000).split(50):
        p = model(x_tgt[idx]).softmax(1)
        entropy = -(p * (p + 1e-6).log()).sum(1).mean()
        mean_p = p.mean(0)
        diversity = (mean_p * (mean_p + 1e-6).log()).sum()
        loss = entropy + diversity
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # both!
    print(f"adapt epoch {epoch}: loss {loss.item():.3f} target acc {accuracy(model, x_tgt, y_tgt):.3f}")
print("source accuracy after", accuracy(model, x_src, y_src),
      "head moved by", (model.outc.weight - source_head).norm().item())
