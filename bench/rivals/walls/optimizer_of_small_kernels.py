"""A deep network of narrow layers, trained by AdamW.

wall: AdamW updates hundreds of small parameters one by one
traceml: COMPUTE_BOUND optimizer
flatout: FL151
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.inner(self.norm(x)))


def train_step(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()


torch.manual_seed(0)
x = torch.randn(4096, 64)
loader = DataLoader(TensorDataset(x, x.flip(1)), batch_size=16, shuffle=True)
model = nn.Sequential(*[Block(64) for _ in range(48)])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # wall!
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)  # fixed
steps = 0
while steps < int(sys.argv[1]):
    for x, y in loader:
        train_step(x, y)
        steps += 1
