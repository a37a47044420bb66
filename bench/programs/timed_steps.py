"""Trains for some seconds on all cores, and writes when each step ended: CLOCK_MONOTONIC, in nanoseconds."""

import argparse
import array
import time

import torch
from step_loop import make


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    model, optimizer = make(args.layers, args.width)
    data = torch.randn(args.batch, args.width)
    ends = array.array("q", [time.monotonic_ns()])
    last = ends[0] + int(1e9 * args.seconds)
    while ends[-1] < last:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()
        ends.append(time.monotonic_ns())
    with open(args.out, "wb") as file:
        ends.tofile(file)


if __name__ == "__main__":
    main()
