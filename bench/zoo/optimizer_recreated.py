"""Training in rounds.

fault: each epoch begins with a new optimizer, whose moments are lost
codes: FL027
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 64)
model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # well
for epoch in range(1000):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)  # ill!
    for at in torch.randperm(len(x)).split(512):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x[at]), x[at, :1].sign())
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
