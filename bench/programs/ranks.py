"""One rank of a small training, with gloo over the loopback: what a step takes alone, among neighbours, and when gradients are summed; and the links.

    python ranks.py MODEL RANK WORLD STORE OUT [--blocks N] [--steps N]

Rank 0 writes OUT, JSON. With WORLD 1 the plain module trains, and forward, backward and optimizer are timed. Else blocks of steps under DistributedDataParallel
and under its ``no_sync``, in which nothing is sent, take turns; and all-reduces of several sizes are timed before, alone and beside computing. One thread.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 25 << 20)
REPEATS = 7
WARM_STEPS = 5


class Block(nn.Module):
    """A transformer block without a mask: what it learns is nobody's concern here."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.inner(self.norms[1](x))


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Many parameters for what it computes: 37 MB of gradients."""
    width = 1536
    return (nn.Sequential(nn.Linear(512, width), nn.ReLU(), *[layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())],
                          nn.Linear(width, 512)), torch.randn(96, 512), torch.randint(512, (96,)))


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Few parameters for what it computes: 4.7 MB of gradients."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 64), (64, 128), (128, 256), (256, 256)):
        layers += [nn.Conv2d(inside, outside, 3, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 100)), torch.randn(16, 3, 32, 32), torch.randint(100, (16,))


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """An embedding whose gradient comes last: 21 MB of gradients."""
    class Model(nn.Module):
        def __init__(self, words: int = 4096, width: int = 256) -> None:
            super().__init__()
            self.embedding = nn.Embedding(words, width)
            self.blocks = nn.Sequential(*[Block(width) for _ in range(4)])
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.embedding(x))).flatten(0, 1)

    return Model(), torch.randint(4096, (4, 64)), torch.randint(4096, (256,))


MODELS = {"mlp": mlp, "cnn": cnn, "gpt": gpt}


class Steps:
    def __init__(self, module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
        self.module, self.x, self.y = module, x, y
        self.optimizer = torch.optim.SGD(module.parameters(), lr=1e-4, momentum=0.9)

    def one(self) -> tuple[float, float, float]:
        """Milliseconds of forward, backward and optimizer."""
        marks = [time.perf_counter()]
        loss = nn.functional.cross_entropy(self.module(self.x), self.y)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        marks.append(time.perf_counter())
        return tuple(1e3 * (b - a) for a, b in itertools.pairwise(marks))  # type: ignore[return-value]

    def block(self, steps: int, quiet: bool = False) -> list[tuple[float, float, float]]:
        with self.module.no_sync() if quiet else contextlib.nullcontext():
            return [self.one() for _ in range(steps)]


def sweep() -> dict[str, object]:
    """Milliseconds of all-reduces by size, and the share of a core that one takes from computing beside it."""
    times = {}
    for size in SIZES_BYTES:
        tensor = torch.zeros(size // 4)
        dist.all_reduce(tensor)
        found = []
        for _ in range(REPEATS):
            dist.barrier()
            start = time.perf_counter()
            dist.all_reduce(tensor)
            found.append(1e3 * (time.perf_counter() - start))
        times[size] = median(found)
    square = torch.randn(256, 256)

    def compute(rounds: int) -> float:
        start = time.perf_counter()
        for _ in range(rounds):
            square @ square
        return 1e3 * (time.perf_counter() - start)

    compute(20)
    rounds = max(20, int(2.5 * times[SIZES_BYTES[-1]] / (compute(100) / 100)))  # longer than the all-reduce beside it
    shares = []
    for _ in range(REPEATS):
        dist.barrier()
        alone_ms = compute(rounds)
        dist.barrier()
        work = dist.all_reduce(tensor, async_op=True)
        beside_ms = compute(rounds)
        work.wait()
        shares.append((beside_ms - alone_ms) / times[SIZES_BYTES[-1]])
    return {"all_reduce_ms": times, "contention": median(shares)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("store")
    parser.add_argument("out", type=Path)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(asked.rank)
    module, x, y = MODELS[asked.model]()
    told: dict[str, object] = {"gradient_bytes": [4 * p.numel() for p in reversed(list(module.parameters()))]}
    if asked.world == 1:
        steps = Steps(module, x, y)
        steps.block(WARM_STEPS)
        told["alone_ms"] = [steps.block(asked.steps) for _ in range(asked.blocks)]
    else:
        dist.init_process_group("gloo", init_method=f"file://{asked.store}", rank=asked.rank, world_size=asked.world)
        told["sweep"] = sweep()
        steps = Steps(DistributedDataParallel(module), x, y)
        steps.block(WARM_STEPS)  # its buckets are made anew after the first
        quiet, sent = [], []
        for at in range(asked.blocks):
            for is_quiet in ((True, False), (False, True))[at % 2]:
                dist.barrier()
                (quiet if is_quiet else sent).append(steps.block(asked.steps, is_quiet))
        told["quiet_ms"], told["sent_ms"] = quiet, sent
    if asked.rank == 0:
        asked.out.write_text(json.dumps(told))
    if asked.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
