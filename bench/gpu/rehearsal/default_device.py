"""A program that makes its tensors on the card by default, the DataLoader's generator too."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_device(args.device)
    inputs = torch.randn(512, 8, device="cpu")
    loader = DataLoader(
        TensorDataset(inputs, inputs[:, :4].argmax(1)),
        batch_size=32,
        shuffle=True,
        generator=torch.Generator(device=args.device),
    )
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for epoch in range(args.epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x.to(args.device)), y.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.9f}", flush=True)


if __name__ == "__main__":
    main()
