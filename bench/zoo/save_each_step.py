"""A classifier that must not lose its work.

fault: a checkpoint is written in each step
codes: FL163
"""
import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
path = os.path.join(tempfile.mkdtemp(), "last.pt")
x, y = torch.randn(8192, 64), torch.randint(0, 8, (8192,))
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(100_000):
    at = torch.randint(len(x), (128,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x[at]), y[at])
    loss.backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "step": step}, path)  # ill!
    if step % 1000 == 999:  # well
        torch.save({"model": model.state_dict(), "step": step}, path)  # well
