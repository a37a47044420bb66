"""Rows of a table that was read from text.

fault: each batch becomes a tensor number by number, from Python lists
codes: FL167
"""
import random

import torch
from torch import nn

random.seed(0)
torch.manual_seed(0)
rows = [[random.gauss(0, 1) for _ in range(300)] for _ in range(2000)]
table = torch.tensor(rows)  # well
model = nn.Sequential(nn.Linear(300, 512), nn.ReLU(), nn.Linear(512, 300))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    batch = torch.tensor([rows[random.randrange(len(rows))] for _ in range(192)])  # ill!
    batch = table[torch.randint(len(table), (192,))]  # well
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
