"""A classifier whose loss is averaged by a metric object.

fault: the metric sums the loss of every step with its graph
codes: FL202 FL251
kind: performance
"""
import torch
from torch import nn


class Mean:
    def __init__(self):
        self.total, self.count = torch.tensor(0.0), 0

    def update(self, value):
        self.total += value.cpu()  # ill!
        self.total += value.detach().cpu()  # well
        self.count += 1


torch.manual_seed(0)
images, labels = torch.randn(2048, 3, 32, 32), torch.randint(0, 10, (2048,))
model = nn.Sequential(nn.Conv2d(3, 24, 3, stride=2), nn.ReLU(), nn.Conv2d(24, 48, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(48 * 49, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(100):
    losses = Mean()
    for step in range(2000):
        at = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[at]), labels[at])
        loss.backward()
        optimizer.step()
        losses.update(loss)  # ill!
        losses.update(loss)  # well
    print(epoch, (losses.total / losses.count).item())
