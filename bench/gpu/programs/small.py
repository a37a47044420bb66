"""A deep, narrow, launch-bound network on synthetic rows: kernels are faster than their launches."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.first, self.second, self.drop = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        return x + self.drop(self.second(torch.relu(self.first(self.norm(x)))))


def network(args):
    return nn.Sequential(
        nn.Linear(args.columns, args.width),
        *(Block(args.width) for _ in range(args.blocks)),
        nn.Linear(args.width, 1),
    )


def table(args):
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(args.rows, args.columns, generator=draw)
    return TensorDataset(
        rows, rows.sin().sum(1, keepdim=True) + 0.1 * torch.randn(args.rows, 1, generator=draw)
    )


def arguments(doc):
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--columns", type=int, default=32)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=24)
    return parser


def main():
    args = arguments(__doc__).parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(table(args), batch_size=args.batch_size, shuffle=True)
    model = network(args).to(device)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    for epoch in range(args.epochs):
        running_loss = 0.0
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            running_loss += loss.item()
        print(f"epoch {epoch + 1}: loss {running_loss / len(loader):.4f}", flush=True)


if __name__ == "__main__":
    main()
