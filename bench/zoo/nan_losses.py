"""Scores that should be positive.

fault: a logarithm of what becomes negative, so that nothing is learnt any more
codes: FL050
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.rand(4096, 32)
y = x.mean(1, keepdim=True)
model = nn.Sequential(nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad()
    loss = (torch.log(model(x[at])) - y[at].log()).square().mean()  # ill!
    loss = (nn.functional.softplus(model(x[at])).log() - y[at].log()).square().mean()  # well
    loss.backward()  # both!
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
