"""Fits a curve that numpy made.

fault: numpy's double precision is kept all the way
codes: FL157
"""
import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
random = np.random.default_rng(0)
points = random.uniform(-3, 3, size=(8192, 32))
values = np.sin(points).sum(axis=1, keepdims=True)
model = nn.Sequential(nn.Linear(32, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1))
x, y = torch.from_numpy(points), torch.from_numpy(values)  # ill!
model = model.double()  # ill!
x, y = torch.from_numpy(points).float(), torch.from_numpy(values).float()  # well
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

for step in range(100_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x[at]), y[at])  # both!
    loss.backward()
    optimizer.step()
    if step % 500 == 0:
        print(step, loss.item())
