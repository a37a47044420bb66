"""A small convolutional network on images in memory, stored as bytes, with torchvision's transforms.

``--same-batch`` trains on one preloaded batch again and again, which is the limit for any loader. ``--root``
takes torchvision's CIFAR-10 from a folder instead of noise.
"""

import argparse

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets, transforms

CIFAR = transforms.Compose(
    [
        transforms.RandomCrop(32, padding=4),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    ]
)
MNIST = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])
SETS = {"cifar": ((50_000, 32, 32, 3), CIFAR), "mnist": ((60_000, 28, 28), MNIST)}


class Images(Dataset):
    """Noise in the shape of a well-known set: pixels do not matter to a loader."""

    def __init__(self, shape, transform):
        random = np.random.default_rng(0)
        self.data = random.integers(0, 256, shape, dtype=np.uint8)
        self.targets = random.integers(0, 10, len(self.data)).tolist()
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]


def network(channels):
    return nn.Sequential(
        nn.Conv2d(channels, 24, 3, padding=1),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1),
        nn.BatchNorm2d(48),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(768, 10),
    )


def batches(loader, same):
    if same:
        batch = next(iter(loader))
        while True:
            yield batch
    while True:
        yield from loader


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=SETS, default="cifar")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--same-batch", action="store_true")
    parser.add_argument("--root")
    parser.add_argument("--steps", type=int, default=1_000_000)
    wanted = parser.parse_args()
    torch.manual_seed(0)
    shape, transform = SETS[wanted.set]
    data = datasets.CIFAR10(wanted.root, transform=transform) if wanted.root else Images(shape, transform)
    loader = DataLoader(data, batch_size=128, shuffle=True, drop_last=True, num_workers=wanted.workers)
    model = network(3 if len(shape) == 4 else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (images, labels) in enumerate(batches(loader, wanted.same_batch)):
        if step == wanted.steps:
            break
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
