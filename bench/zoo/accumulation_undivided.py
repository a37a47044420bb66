"""Four micro-batches make a step.

fault: their losses are summed and not divided by four
codes: FL005
"""
import torch
from torch import nn

torch.manual_seed(0)
micro_batches = 4
x = torch.randn(8192, 48)
y = x.cumsum(1)[:, -1:] / 7
model = nn.Sequential(nn.Linear(48, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.MSELoss()
for epoch in range(1000):
    for i, at in enumerate(torch.randperm(len(x)).split(64)):
        loss = criterion(model(x[at]), y[at])  # ill
        loss = criterion(model(x[at]), y[at]) / micro_batches  # well
        loss.backward()  # both!
        if (i + 1) % micro_batches == 0:
            optimizer.step()
            optimizer.zero_grad()
    print(epoch, loss.item())
