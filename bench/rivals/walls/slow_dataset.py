"""A classifier of small images.

wall: each image is made brighter pixel by pixel, in Python
traceml: INPUT_BOUND
flatout: FL150 FL161
"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        self.images = torch.rand(count, 1, 24, 24)
        self.labels = torch.randint(10, (count,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        image = [min(1.0, 1.2 * pixel) for pixel in self.images[at].flatten().tolist()]  # wall!
        return torch.tensor(image).view(1, 24, 24), self.labels[at]  # wall!
        return (1.2 * self.images[at]).clamp(max=1.0), self.labels[at]  # fixed


def train_step(images, labels):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()


torch.manual_seed(0)
loader = DataLoader(Images(2048), batch_size=64, shuffle=True)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 400, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
steps = 0
while steps < int(sys.argv[1]):
    for images, labels in loader:
        train_step(images, labels)
        steps += 1
