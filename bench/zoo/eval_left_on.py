"""A network with dropout and batch normalisation.

fault: after the first validation it stays in evaluation mode
codes: FL016
"""
import torch
from torch import nn


@torch.no_grad()
def accuracy(model, x, y):
    model.eval()  # both!
    found = model(x).argmax(1)
    model.train()  # well
    return (found == y).float().mean().item()


torch.manual_seed(0)
x, y = torch.randn(4096, 64), torch.randint(0, 10, (4096,))
model = nn.Sequential(nn.Linear(64, 512, bias=False), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.3), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for epoch in range(1000):
    model.train()  # well
    for at in torch.randperm(3584).split(256):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[at]), y[at])  # both!
        loss.backward()
        optimizer.step()
    print(epoch, accuracy(model, x[3584:], y[3584:]))  # both!
