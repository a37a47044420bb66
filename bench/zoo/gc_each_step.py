"""A segmentation network on small images.

fault: the garbage collector is called in each step
codes: FL105
"""
import gc

import torch
from torch import nn

torch.manual_seed(0)
images = torch.randn(512, 3, 24, 24)
masks = (images.mean(1) > 0).long()
model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100_000):
    at = torch.randint(len(images), (16,))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images[at]), masks[at])
    loss.backward()
    optimizer.step()
    gc.collect()  # ill!
    if step % 100 == 0:
        print(step, loss.item())
