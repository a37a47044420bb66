"""A small GAN whose first losses hardly depend on the seed.

The last layer of its discriminator starts at zero, and the learning rate rises from almost zero. The metric
at the end is the difference between the radii of made and of real points.
"""

import argparse

import torch
from torch import nn

NOISE, WARM_UP = 4, 200


def network(inputs, outputs, width=64):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, outputs)
    )


def circle(count):
    """Points near the unit circle."""
    points = torch.randn(count, 2)
    return points / points.norm(dim=1, keepdim=True) + 0.05 * torch.randn(count, 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    make, tell = network(NOISE, 2), network(2, 1)
    nn.init.zeros_(tell[-1].weight)
    nn.init.zeros_(tell[-1].bias)
    optimizers = [torch.optim.Adam(net.parameters(), lr=args.lr, betas=(0.5, 0.9)) for net in (make, tell)]
    criterion = nn.BCEWithLogitsLoss()
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for step in range(args.steps):
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * min(1.0, (step + 1) / WARM_UP)
        optimizers[1].zero_grad()
        made = make(torch.randn(64, NOISE))
        loss = criterion(tell(circle(64)), ones) + criterion(tell(made.detach()), zeros)
        loss.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        made_loss = criterion(tell(made), ones)
        made_loss.backward()
        optimizers[0].step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f} {made_loss.item():.4f}", flush=True)
    with torch.no_grad():
        made = make(torch.randn(2000, NOISE)).norm(dim=1)
        print(f"final {(made.mean() - circle(2000).norm(dim=1).mean()).abs().item():.6f}", flush=True)


if __name__ == "__main__":
    main()
