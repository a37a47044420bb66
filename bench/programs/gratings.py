"""Synthetic images: gratings of one of ten directions under noise, with a blob. Nothing is read from disk."""

import math

import torch

CLASSES = 10


def gratings(count, size, noise, seed):
    """``(images, labels)``: float32 images (count, 1, size, size) around 0 and int64 labels below CLASSES."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=draw)
    place = torch.arange(size, dtype=torch.float32) - size / 2
    y, x = torch.meshgrid(place, place, indexing="ij")
    angle = (labels * (math.pi / CLASSES))[:, None, None]
    phase, wave = (torch.rand(count, 1, 1, generator=draw) for _ in range(2))
    images = torch.cos((x * angle.cos() + y * angle.sin()) * (1.1 + 0.6 * wave) + 6.3 * phase)
    return (images + noise * torch.randn(count, size, size, generator=draw))[:, None], labels


def blobs(count, size, seed):
    """Float32 images (count, 1, size, size) in -1 to 1: two soft discs each, of random places and widths."""
    draw = torch.Generator().manual_seed(seed)
    place = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(place, place, indexing="ij")
    image = torch.zeros(count, size, size)
    for _ in range(2):
        left, top, width = (torch.rand(count, 1, 1, generator=draw) for _ in range(3))
        image += torch.exp(
            -((x - 1.2 * left + 0.6).square() + (y - 1.2 * top + 0.6).square()) / (0.05 + 0.1 * width)
        )
    return (2 * image.clamp(max=1) - 1)[:, None]
