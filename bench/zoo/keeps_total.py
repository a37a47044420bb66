"""A classifier that sums its losses over an epoch.

fault: the sum carries the graphs of all steps
codes: FL202
"""
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(4096, 3, 16, 16)
y = (x.mean((1, 2, 3)) > 0).long()
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 144, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()

for epoch in range(100):
    total = 0
    for _ in range(2000):
        at = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        loss = criterion(model(x[at]), y[at])
        loss.backward()
        optimizer.step()
        total += loss  # ill!
        total += loss.detach()  # well
    print(f"epoch {epoch}: {total / 2000}")
