"""Packed documents under torch.compile.

fault: the longest length and the number of documents change with each batch, and each pair is compiled again
codes: FL155
kind: performance
"""
import random

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.inner, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, starts, longest):
        x = x * (longest / 256) + starts.float().mean() / 1e4  # ill
        x = x * (longest / 256) + starts.float().mean() / 1e4  # well
        return x + self.out(torch.relu(self.inner(x)))


torch.manual_seed(0)
random.seed(0)
block, head = Block(), nn.Linear(128, 64)
compiled = torch.compile(block, backend="aot_eager", dynamic=False)  # ill!
compiled = torch.compile(block, backend="aot_eager", dynamic=True)  # well
optimizer = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.01)
x, y = torch.randn(8, 256, 128), torch.randn(8, 256, 64)
for step in range(100_000):
    cuts = sorted(random.sample(range(1, 256), random.randrange(3, 20)))
    starts = torch.tensor([0, *cuts])
    longest = max(b - a for a, b in zip([0, *cuts], [*cuts, 256]))  # ill
    longest = torch.tensor(float(max(b - a for a, b in zip([0, *cuts], [*cuts, 256]))))  # well
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(head(compiled(x, starts, longest)), y)  # ill!
    loss = nn.functional.mse_loss(head(compiled(x, starts, longest)), y)  # well
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
