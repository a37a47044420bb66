"""A regression that writes a log.

fault: every step writes to the disk and waits until it is there
codes: FL163 FL167
"""
import os
import tempfile

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(8192, 64)
y = x[:, :1].abs()
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with open(os.path.join(tempfile.mkdtemp(), "log.txt"), "w") as log:
    for step in range(100_000):
        at = torch.randint(len(x), (128,))
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[at]), y[at])
        loss.backward()
        optimizer.step()
        log.write(f"{step} " + ",".join(f"{value:.6f}" for value in range(6000)) + "\n")  # ill!
        log.flush()  # ill!
        os.fsync(log.fileno())  # ill!
        if step % 500 == 0:  # well
            log.write(f"{step} {loss.item()}\n")  # well
