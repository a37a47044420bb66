"""Keeps the best weights.

fault: all weights are copied in each step, just in case
codes: FL167
"""
import copy

import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 256)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 256))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    batch = x[torch.randint(len(x), (64,))]
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch), batch)
    loss.backward()
    optimizer.step()
    kept = copy.deepcopy([model.state_dict(), optimizer.state_dict(), model])  # ill!
    if step % 500 == 499:  # well
        kept = copy.deepcopy(model.state_dict())  # well
        print(step, len(kept), loss.item())  # well
