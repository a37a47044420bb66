"""A regression that logs its losses.

wall: each line of the log is forced onto the disk
traceml: RESIDUAL_HEAVY
flatout: FL163 FL167
"""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    losses.append(loss.detach())
    if len(losses) == 100:  # fixed
        log.write(f"{torch.stack(losses).mean().item()}\n")  # fixed
        losses.clear()  # fixed
    log.write(f"{losses.pop().item()}\n")  # wall
    log.flush()  # wall!
    os.fsync(log.fileno())  # wall!


torch.manual_seed(0)
losses, log = [], open("losses.txt", "w")
x = torch.randn(4096, 64)
loader = DataLoader(TensorDataset(x, x.cumsum(1)), batch_size=64, shuffle=True)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
steps = 0
while steps < int(sys.argv[1]):
    for x, y in loader:
        train_step(x, y)
        steps += 1
