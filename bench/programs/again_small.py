"""A small model that trains for many steps on data in memory: a replay of it costs only Python time."""

import torch
from torch import nn

torch.manual_seed(0)
rows, targets = torch.randn(4096, 32), torch.randint(0, 4, (4096,))
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 4))
sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(10_000_000):
    at = 32 * step % len(rows)
    loss = nn.functional.cross_entropy(model(rows[at : at + 32]), targets[at : at + 32])
    sgd.zero_grad()
    loss.backward()
    sgd.step()
    if step % 1000 == 0:
        print(step, loss.item(), flush=True)
