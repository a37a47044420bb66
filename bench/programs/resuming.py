"""One start of a training with `flatout.Loop` and ``checkpoint_dir=``: it may resume, and may be killed.

A process that has imported torch forks it. Shared memory, which outlives it, holds the number of its steps,
and the step from which it resumed.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import struct
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import flatout

SAMPLES, FEATURES, CLASSES = 203, 12, 5
OPTIMIZERS = ("AdamW", "SGD", "RMSprop")


@dataclass(frozen=True)
class Setting:
    """A setting drawn from a seed. ``every``: 0 leaves the interval to the Loop."""

    seed: int
    workers: int
    start: str
    persistent: bool
    shuffle: bool
    augment: bool
    accumulate: int
    ranks: int
    every: int
    optimizer: str
    clip: bool
    epochs: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def drawn(seed: int, spawn: bool) -> Setting:
    """Draws a setting. ``spawn``: whether loader workers may be spawned; each of them imports torch."""
    draw = random.Random(seed)
    workers = draw.choice((0, 0, 2, 4))
    start = draw.choice(("fork", "fork", "fork", "spawn")) if spawn and workers else "fork"
    if start == "spawn":
        workers = 2
    return Setting(
        seed,
        workers,
        start,
        draw.random() < 0.5,
        draw.random() < 0.8,
        draw.random() < 0.7,
        draw.choice((1, 1, 2)),
        draw.choice((1, 1, 1, 2)) if start == "fork" else 1,
        draw.choice((1, 1, 4, 16, 0)),
        draw.choice(OPTIMIZERS),
        draw.random() < 0.3,
        2 if start == "spawn" else 4,
    )


class Invented(Dataset):
    def __init__(self, augment: bool) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x, self.y = (
            torch.randn(SAMPLES, FEATURES, generator=generator),
            torch.randint(0, CLASSES, (SAMPLES,), generator=generator),
        )
        self.augment, self.own = augment, np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = self.x[index]
        if self.augment:
            x = (
                x
                + 0.1 * torch.randn(FEATURES)
                + random.random() * 0.1
                + float(np.random.rand()) * 0.1
                + float(self.own.random()) * 0.1
            )
        return x, self.y[index]


def jittered(samples: list[Any]) -> Any:
    x, y = torch.utils.data.default_collate(samples)
    return x * (1 + 0.01 * random.random()), y


def loss_fn(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch[0]), batch[1])


class Told:
    """Two numbers a rank, in memory shared with the parent: steps done, and the resumed step (-1: none)."""

    def __init__(self, ranks: int) -> None:
        self._memory = mmap.mmap(-1, 16 * ranks)

    def put(self, rank: int, at: int, value: int) -> None:
        struct.pack_into("q", self._memory, 16 * rank + 8 * at, value)

    def get(self, rank: int, at: int) -> int:
        return int(struct.unpack_from("q", self._memory, 16 * rank + 8 * at)[0])


def live(setting: Setting, folder: Path, store: str, rank: int, metadata: Told) -> str:
    """Trains to the end and returns the SHA-256 of weights, optimizer, average and random states.

    ``store``: the rendezvous file of two ranks.
    """
    warnings.filterwarnings("ignore", "This DataLoader will create")
    if setting.ranks > 1:
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=setting.ranks
        )
    flatout.seed(setting.seed)
    model = nn.Sequential(
        nn.Linear(FEATURES, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, CLASSES)
    )
    model[0].register_buffer("scratch", torch.zeros(3), persistent=False)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = getattr(torch.optim, setting.optimizer)(model.parameters(), lr=0.01, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=2000)
    flatout.seed(setting.seed + 1000 * rank)
    data = Invented(setting.augment)
    more: dict[str, Any] = {"num_workers": setting.workers, "collate_fn": jittered}
    if setting.workers:
        more |= {"multiprocessing_context": setting.start, "persistent_workers": setting.persistent}
    sampler = (
        DistributedSampler(data, setting.ranks, rank, shuffle=setting.shuffle) if setting.ranks > 1 else None
    )
    loader = DataLoader(
        data,
        4,
        shuffle=setting.shuffle if sampler is None else None,
        sampler=sampler,
        drop_last=setting.ranks > 1,
        **more,
    )
    trained = nn.parallel.DistributedDataParallel(model) if setting.ranks > 1 else model
    loop = flatout.Loop(
        trained,
        optimizer,
        loss_fn,
        loader,
        epochs=setting.epochs,
        scheduler=scheduler,
        clip=1.0 if setting.clip else None,
        effective_batch=4 * setting.accumulate if setting.accumulate > 1 else None,
        allow_inexact=True,
        checkpoint_dir=folder,
        save_every=setting.every or None,
        extra_state={"average": average},
    )
    metadata.put(rank, 1, loop.resumed.step if loop.resumed is not None else -1)
    if loop.resumed is not None and not loop.resumed.exact:
        raise RuntimeError("; ".join(loop.resumed.sentences()))
    for step in loop:
        average.update_parameters(model)
        model[0].scratch.add_(torch.rand(3))
        if sampler is not None and step.ends_epoch:
            sampler.set_epoch(step.epoch + 1)
        metadata.put(rank, 0, step.index + 1)
    return _digest(model, average, optimizer, scheduler)


def _digest(model: Any, average: Any, optimizer: Any, scheduler: Any) -> str:
    digest = hashlib.sha256()
    for module in (model, average):
        for tensor in [*module.parameters(), *module.buffers()]:
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    for number, state in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(state.items()):
            digest.update(
                f"{number}{name}".encode()
                + (value.numpy().tobytes() if hasattr(value, "numpy") else repr(value).encode())
            )
    digest.update(repr(scheduler.get_last_lr()).encode())
    digest.update(
        torch.get_rng_state().numpy().tobytes()
        + repr(random.getstate()).encode()
        + np.random.get_state()[1].tobytes()
    )
    digest.update(repr(np.random.get_state()[2:]).encode())
    return digest.hexdigest()
