"""A deep network of narrow layers.

wall: the norm of each gradient is read as a Python number in each step
traceml: RESIDUAL_HEAVY
flatout: FL101 FL167
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))


def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    norms = [float(p.grad.square().sum().sqrt()) for p in model.parameters()]  # wall!
    largest.append(max(norms))  # wall
    largest.append(max(torch._foreach_norm([p.grad for p in model.parameters()])))  # fixed
    optimizer.step()


torch.manual_seed(0)
largest = []
x = torch.randn(4096, 64)
loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=32, shuffle=True)
model = nn.Sequential(*[Block(64) for _ in range(32)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = 0
while steps < int(sys.argv[1]):
    for x, y in loader:
        train_step(x, y)
        steps += 1
