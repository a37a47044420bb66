"""One rank of a small training, with gloo over the loopback: step times in several settings, and link speeds.

    python ranks.py MODEL RANK WORLD STORE OUT [--turns N] [--steps N] [--patience S]

Rank 0 writes OUT, JSON. It times all-reduces of several sizes, and computing during one. Then blocks of steps
are interleaved: ``alone`` (rank 0 trains a separate model, the others wait), ``quiet`` (all train without
communication, under ``no_sync``), ``sent`` (plain DistributedDataParallel). Each process uses one thread.

Each block starts when no other program uses the machine, and records how many cores others used meanwhile.
Turns repeat until N were undisturbed, or the time is over. With a patience of 0 there are N turns, whatever
else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SIZES_BYTES = (1 << 12, 1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 25 << 20)
REPEATS = 7
WARM_STEPS = 4
CALM_CORES = 0.2  # that others may use
KINDS = ("alone", "quiet", "sent")


class Block(nn.Module):
    """A transformer block without a mask; the benchmark ignores what it learns."""

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
    """Many parameters for little computation: 17 MB of gradients."""
    width = 1024
    return (
        nn.Sequential(
            nn.Linear(512, width),
            nn.ReLU(),
            *[layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())],
            nn.Linear(width, 512),
        ),
        torch.randn(64, 512),
        torch.randint(512, (64,)),
    )


def cnn() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Few parameters for its computation: 4.3 MB of gradients."""
    layers: list[nn.Module] = []
    for inside, outside in ((3, 64), (64, 128), (128, 256), (256, 256)):
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.GroupNorm(8, outside),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return (
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(256 * 4, 100)),
        torch.randn(8, 3, 32, 32),
        torch.randint(100, (8,)),
    )


def gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """An embedding whose gradient comes last: 10 MB of gradients."""

    class Model(nn.Module):
        def __init__(self, words: int = 2048, width: int = 192) -> None:
            super().__init__()
            self.embedding = nn.Embedding(words, width)
            self.blocks = nn.Sequential(*[Block(width) for _ in range(4)])
            self.head = nn.Linear(width, words, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.blocks(self.embedding(x))).flatten(0, 1)

    return Model(), torch.randint(2048, (2, 64)), torch.randint(2048, (128,))


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
        return tuple(round(1e3 * (b - a), 3) for a, b in itertools.pairwise(marks))  # type: ignore[return-value]

    def block(self, kind: str, steps: int) -> dict[str, object]:
        """``ms``: of each step its phases. ``others``: the cores that others used."""
        machine, own, start = machine_s(), time.process_time(), time.perf_counter()
        with self.module.no_sync() if kind == "quiet" else contextlib.nullcontext():  # type: ignore[operator]
            found = [self.one() for _ in range(steps)] if kind != "alone" or dist.get_rank() == 0 else []
        dist.barrier()
        passed, used = time.perf_counter() - start, torch.tensor([time.process_time() - own])
        machine = machine_s() - machine
        dist.all_reduce(used)  # so that all ranks get the same number, and decide the same
        others = torch.tensor([max(0.0, machine - float(used)) / passed])
        dist.broadcast(others, 0)
        return {"ms": found, "others": float(others)}


def is_calm(turn: dict[str, dict[str, object]]) -> bool:
    return all(block["others"] <= CALM_CORES for block in turn.values())  # type: ignore[operator]


def machine_s() -> float:
    """Returns the busy seconds of all cores together: all but idle and disk wait (proc(5), /proc/stat)."""
    times = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(times) - times[3] - times[4]) / os.sysconf("SC_CLK_TCK")


def wait_for_calm(until: float) -> bool:
    """Waits on all ranks until other programs stop using the machine. Returns False on a timeout."""
    calm, late = torch.zeros(1), False
    while not late:
        if dist.get_rank() == 0:
            used, start = machine_s(), time.perf_counter()
            time.sleep(0.3)
            calm[0] = float((machine_s() - used) / (time.perf_counter() - start) <= CALM_CORES)
            late = time.perf_counter() > until
        else:
            calm[0] = 0.0
        metadata = torch.stack([calm[0], torch.tensor(float(late))])
        dist.broadcast(metadata, 0)
        if metadata[0]:
            return True
        late = bool(metadata[1])
    return False


def sweep() -> dict[str, object]:
    """Returns milliseconds of all-reduces by size, and the share of a core that one takes from computing."""
    machine, own, start_s, times = machine_s(), time.process_time(), time.perf_counter(), {}
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
    rounds = max(
        20, int(2.5 * times[SIZES_BYTES[-1]] / (compute(100) / 100))
    )  # longer than the simultaneous all-reduce
    shares = []
    for _ in range(REPEATS):
        dist.barrier()
        alone_ms = compute(rounds)
        dist.barrier()
        work = dist.all_reduce(tensor, async_op=True)
        beside_ms = compute(rounds)
        work.wait()
        shares.append((beside_ms - alone_ms) / times[SIZES_BYTES[-1]])
    used = torch.tensor([time.process_time() - own])
    machine, passed = machine_s() - machine, time.perf_counter() - start_s
    dist.all_reduce(used)
    return {
        "all_reduce_ms": times,
        "contention": median(shares),
        "others": max(0.0, machine - float(used)) / passed,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("store")
    parser.add_argument("out", type=Path)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--patience", type=float, default=60.0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(asked.rank)
    module, x, y = MODELS[asked.model]()
    metadata: dict[str, object] = {
        "gradient_bytes": [4 * p.numel() for p in reversed(list(module.parameters()))]
    }
    dist.init_process_group(
        "gloo", init_method=f"file://{asked.store}", rank=asked.rank, world_size=asked.world
    )
    alone, together = Steps(copy.deepcopy(module), x, y), Steps(DistributedDataParallel(module), x, y)
    steps = {"alone": alone, "quiet": together, "sent": together}
    for kind in KINDS:
        steps[kind].block(kind, WARM_STEPS)  # DDP rebuilds its buckets after the first step
    until = time.perf_counter() + asked.timeout
    sweeps: list[dict[str, object]] = []
    turns: list[dict[str, dict[str, object]]] = []

    # A machine that is never idle still gives one sweep and one turn; their blocks record the disturbance.
    def go_on() -> bool:
        if not asked.timeout:
            return len(turns) < asked.turns
        return sum(is_calm(turn) for turn in turns) < asked.turns and (wait_for_calm(until) or not turns)

    while go_on():
        if len(sweeps) <= len(turns) // 3:
            sweeps.append(sweep())
        turns.append(
            {
                kind: steps[kind].block(kind, asked.steps)
                for kind in KINDS[len(turns) % 3 :] + KINDS[: len(turns) % 3]
            }
        )
    metadata["sweeps"], metadata["turns"] = sweeps, turns
    if asked.rank == 0:
        asked.out.write_text(json.dumps(metadata))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
