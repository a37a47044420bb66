"""A small DCGAN on soft discs: two networks, two Adam optimizers, three backward passes a step.

The metric at the end is the sliced Wasserstein distance between made and fresh images, which is lower for
better ones.
"""

import argparse

import torch
from gratings import blobs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SIZE, NOISE = 16, 32


def generator(width):
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 2 * width, 4, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1, bias=False),
        nn.Tanh(),
    )


def discriminator(width):
    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.Conv2d(width, 2 * width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.LeakyReLU(0.2),
        nn.Conv2d(2 * width, 1, 4, bias=False),
        nn.Sigmoid(),
        nn.Flatten(0),
    )


def start(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)


@torch.no_grad()
def distance(net, count=2000):
    """Mean distance between sorted projections of made and of fresh images."""
    draw = torch.Generator().manual_seed(99)
    directions = torch.randn(SIZE * SIZE, 64, generator=draw)
    net.eval()
    made = net(torch.randn(count, NOISE, 1, 1, generator=draw)).flatten(1)
    net.train()
    both = [(images @ directions).sort(0).values for images in (made, blobs(count, SIZE, seed=7).flatten(1))]
    return (both[0] - both[1]).abs().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=24)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    loader = DataLoader(TensorDataset(blobs(4096, SIZE, seed=1)), batch_size=64, shuffle=True, drop_last=True)
    make, tell = generator(args.width).apply(start), discriminator(args.width).apply(start)
    of_make, of_tell = (
        torch.optim.Adam(net.parameters(), lr=args.lr, betas=(0.5, 0.999)) for net in (make, tell)
    )
    criterion = nn.BCELoss()
    for epoch in range(args.epochs):
        for (images,) in loader:
            tell.zero_grad()
            real = criterion(tell(images), torch.full((len(images),), 0.9))
            real.backward()
            fake = make(torch.randn(len(images), NOISE, 1, 1))
            false = criterion(tell(fake.detach()), torch.zeros(len(images)))
            false.backward()
            of_tell.step()
            make.zero_grad()
            loss = criterion(tell(fake), torch.ones(len(images)))
            loss.backward()
            of_make.step()
        print(
            f"epoch {epoch + 1}/{args.epochs}: {real.item() + false.item():.4f} {loss.item():.4f}", flush=True
        )
    print(f"final {distance(make):.6f}", flush=True)


if __name__ == "__main__":
    main()
