"""An optimizer that calls the forward and backward pass itself, with gradients clipped and a schedule."""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--pause", type=float, default=0.0, help="additional seconds of each pass")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(args.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    inputs = torch.randn(2048, 8)
    loader = DataLoader(TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)), batch_size=128)

    for epoch in range(args.epochs):
        for x, y in loader:
            x, y = x.to(args.device), y.to(args.device)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                loss.backward()
                time.sleep(args.pause)
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                return loss

            loss = optimizer.step(closure)
        schedule.step()
        print(f"epoch {epoch}: {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main()
