"""Large images in batches of two.

fault: batch normalisation over two values a channel
codes: FL350
"""
import torch
from torch import nn

torch.manual_seed(0)
images, labels = torch.randn(256, 3, 48, 48), torch.randint(0, 4, (256,))
model = nn.Sequential(
    nn.Conv2d(3, 24, 3, stride=2), nn.ReLU(), nn.Conv2d(24, 48, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(192, 64, bias=False),
    nn.BatchNorm1d(64),  # ill!
    nn.LayerNorm(64),  # well
    nn.ReLU(), nn.Linear(64, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(100_000):
    at = torch.randint(len(images), (2,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[at]), labels[at])  # both!
    loss.backward()
    optimizer.step()
    if step % 200 == 0:
        print(step, loss.item())
