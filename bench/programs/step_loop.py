"""A training loop of plain steps; as a program, it prints how many layers a step of --calibrate MS has."""

import argparse
import json
import statistics
import time

import torch
from torch import nn


def make(layers, width):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)])
    return model, torch.optim.SGD(model.parameters(), lr=1e-4)


def steps(model, optimizer, data, seconds=0.0, fewest=20):
    """Returns the length of each step in seconds, over at least this time and number of steps."""
    lengths, start = [], time.perf_counter()
    before = start
    while before - start < seconds or len(lengths) < fewest:
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        now = time.perf_counter()
        lengths.append(now - before)
        before = now
    return lengths


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--calibrate", type=float, metavar="MS", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = torch.randn(args.batch, args.width)
    few, many = (statistics.median(steps(*make(layers, args.width), data, 1.0)) for layers in (1, 5))
    layers = 1 + max(0, round((args.calibrate / 1000 - few) / max((many - few) / 4, 1e-6)))
    print(json.dumps({"layers": layers}))


if __name__ == "__main__":
    main()
