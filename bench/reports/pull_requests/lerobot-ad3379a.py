"""A policy trained on an endless loader of recordings.

fault: itertools.cycle keeps every batch that it has seen
codes: FL251 FL252
kind: performance
"""
from itertools import cycle  # ill

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Recordings(Dataset):
    def __len__(self):
        return 200_000

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        return torch.rand(3, 32, 32, generator=random), torch.rand(7, generator=random)


def cycle(loader):  # well
    while True:  # well
        yield from loader  # well


torch.manual_seed(0)
loader = DataLoader(Recordings(), batch_size=32, shuffle=True)
batches = cycle(loader)  # ill!
batches = cycle(loader)  # well
model = nn.Sequential(nn.Conv2d(3, 32, 5, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 25, 7))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(100_000):
    images, actions = next(batches)  # ill!
    images, actions = next(batches)  # well
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(images), actions)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print(step, loss.item())
