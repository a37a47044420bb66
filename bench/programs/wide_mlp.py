"""A wide MLP with Adam: a few large matrix products and a large update. Plain tensors, no loader."""

import torch
from torch import nn


def main():
    torch.manual_seed(0)
    x, y = torch.randn(4096, 512), torch.randint(0, 20, (4096,))
    model = nn.Sequential(
        nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 20)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(1_000_000):
        rows = torch.randint(len(x), (128,))
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 500 == 0:
            print(f"step {step}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
