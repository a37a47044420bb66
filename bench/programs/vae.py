"""A small variational autoencoder on soft discs; its loss is a sum over pixels and samples.

The metric at the end is the loss of fresh images.
"""

import argparse

import torch
from gratings import blobs
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE = 16


class Autoencoder(nn.Module):
    def __init__(self, width=200, code=12):
        super().__init__()
        self.inside, self.mean, self.log_variance = (
            nn.Linear(SIZE * SIZE, width),
            nn.Linear(width, code),
            nn.Linear(width, code),
        )
        self.outside, self.pixels = nn.Linear(code, width), nn.Linear(width, SIZE * SIZE)

    def forward(self, x):
        hidden = F.relu(self.inside(x.flatten(1)))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return torch.sigmoid(self.pixels(F.relu(self.outside(code)))), mean, log_variance


def loss_of(x, pixels, mean, log_variance):
    """Summed over the batch."""
    likelihood = F.binary_cross_entropy(pixels, x.flatten(1), reduction="sum")
    return likelihood - 0.5 * torch.sum(1 + log_variance - mean.square() - log_variance.exp())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    loader = DataLoader(TensorDataset((blobs(4096, SIZE, seed=1) + 1) / 2), batch_size=64, shuffle=True)
    model = Autoencoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        for (images,) in loader:
            optimizer.zero_grad()
            loss = loss_of(images, *model(images))
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}/{args.epochs}: loss {loss.item() / len(images):.4f}", flush=True)
    fresh = (blobs(2000, SIZE, seed=2) + 1) / 2
    torch.manual_seed(5)
    with torch.no_grad():
        print(f"final {loss_of(fresh, *model(fresh)).item() / len(fresh):.6f}", flush=True)


if __name__ == "__main__":
    main()
