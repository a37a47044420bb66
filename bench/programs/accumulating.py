"""A convolutional network on synthetic images that can accumulate micro-batches.

``--batch 64 --parts 4`` updates once in 256 samples.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=256)
parser.add_argument("--parts", type=int, default=1)
parser.add_argument("--epochs", type=int, default=100_000)
asked = parser.parse_args()

torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 3, 32, 32), torch.randint(0, 10, (4096,)))
loader = DataLoader(data, asked.batch, shuffle=True, drop_last=True)
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, stride=2),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(1568, 512),
    nn.ReLU(),
    nn.Linear(512, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(asked.epochs):
    for at, (images, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(images), labels) / asked.parts
        loss.backward()
        if (at + 1) % asked.parts == 0:
            optimizer.step()
            optimizer.zero_grad()
