"""A regression with a wide network.

wall: the weights and the optimizer are written to a file in each step
traceml: RESIDUAL_HEAVY
flatout: FL163
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_step(x, y):
    global steps
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    steps += 1
    if steps % 500 == 0:  # fixed
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")  # fixed
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "last.pt")  # wall!


torch.manual_seed(0)
x = torch.randn(4096, 128)
loader = DataLoader(TensorDataset(x, x.cumsum(1)), batch_size=128, shuffle=True)
model = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 128))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
steps = 0
while steps < int(sys.argv[1]):
    for x, y in loader:
        train_step(x, y)
