"""Tensors on a device: creating, moving and computing them, and reading a number back."""

import argparse

import torch


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    matrix = torch.randn(args.size, args.size, device=device)  # created on the device: nothing is copied
    matrix = (matrix @ matrix.T) / args.size + torch.eye(args.size, device=device)
    wanted = torch.arange(args.size, dtype=torch.float32).to(device)  # created on the host, copied once

    found = torch.zeros(args.size, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([found], lr=0.1, momentum=0.9)
    for step in range(args.steps):
        loss = (matrix @ found - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(
                f"step {step}: loss {loss.item():.4f}", flush=True
            )  # .item() waits for the device, so not in each step


if __name__ == "__main__":
    main()
