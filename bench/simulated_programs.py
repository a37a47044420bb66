"""Simulated training programs for `search_simulator.py`: measured lever effects, realistic disturbances.

The log of a block's time is that of the step plus

    luck      process-to-process variation, for the whole run
    drift     of the machine: a random walk, and waves of about twenty seconds
    work      of the step window, in three programs of ten
    noise     Student's t with three degrees of freedom, and outliers: blocks in which the program also did
              something else

A step takes compute time and, in programs with a data loader, time to fetch and to transform a batch. A
loader worker does the latter in parallel with the compute and takes cores from it, unless the program
computes on one thread less. So levers that speed up compute gain little until the data path is fast, and the
two data levers gain more together than separately. Effects of single levers are sampled from those measured
on public scripts (`open_set_cpu_*.json`), with a jitter. In addition, one to three pairs have an unknown
interaction.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from provenance import SRC  # noqa: F401  puts src on the path

from flatout.tune.space import Factor, Space

MALLOCS = ("malloc=tcmalloc", "malloc=mimalloc", "malloc=glibc")
LIVE_ELSEWHERE = (
    "debug_off",
    "fused_ops",
    "inplace",
    "cudnn_benchmark",
)  # in addition to those measured on many scripts
JITTER = 0.03
WARM_UP_S = 8.0  # of a compiled program, beyond its start
EVERY_LEVER_HAS = 0.15  # sd of the prior of an effect for an unknown lever
DATA_LEVERS = ("loader", "cached_prefix", "batched_transforms")
KNOWN_PAIRS = frozenset(
    map(
        frozenset,
        (
            ("loader", "threads"),
            ("cached_prefix", "batched_transforms"),
            ("loader", "cached_prefix"),
            ("loader", "batched_transforms"),
        ),
    )
)


def measured_effects(pages: Iterable[Path]) -> dict[str, list[float]]:
    """Returns the effects in log time (negative is faster) by lever, each by itself in the open set."""
    found: dict[str, list[float]] = {}
    for script in (script for page in pages for script in json.loads(page.read_text())["scripts"].values()):
        for lever in script.get("levers", ()):
            if lever["ratio"] and "together" not in lever["how"]:
                found.setdefault(lever["name"], []).append(-math.log(lever["ratio"]))
    return found


@dataclass(frozen=True)
class Program:
    """One simulated program: its levers, and the step time under each set of them."""

    space: Space
    effects: Any  # (factors,) on the part of the step that each acts on
    shares: tuple[float, float, float]  # of a plain step: compute, fetch, transform
    interactions: tuple[tuple[int, int, float], ...]
    crowding: float  # cost of a loader worker for the compute, in log time
    luck: float
    noise: float
    drift: float
    work: float
    outliers: float
    workers: int = 0  # of the program's own loader

    def log_times(self, rows: Any) -> Any:
        """Returns the (n,) true log times of a step, of (n, factors) booleans; plain is 0."""
        return self._log_times(rows) - self._log_times(np.zeros((1, rows.shape[1]), dtype=bool))

    def _log_times(self, rows: Any) -> Any:
        parts = {
            name: math.log(max(share, 1e-9)) * np.ones(len(rows))
            for name, share in zip(("compute", "fetch", "transform"), self.shares, strict=True)
        }
        columns = self.space.columns_of
        on = {lever: rows[:, at].any(axis=1) for lever, at in columns.items()}
        for at, factor in enumerate(self.space.factors):
            part = {"cached_prefix": "fetch", "batched_transforms": "transform"}.get(factor.lever, "compute")
            for name in parts if factor.lever == "malloc" else (part,):
                parts[name] = parts[name] + rows[:, at] * self.effects[at]
        data = np.exp(parts["fetch"]) + np.exp(parts["transform"])
        compute = np.exp(parts["compute"])
        workers = np.full(len(rows), self.workers)
        for at in columns.get("loader", ()):
            workers[rows[:, at]] = int(self.space.factors[at].key.partition("=")[2])
        threads = on.get("threads", np.zeros(len(rows), dtype=bool))
        crowded = compute * np.exp(np.where(threads, 0.0, self.crowding * workers))
        beside = np.maximum(crowded, data / np.maximum(workers, 1)) + 0.02
        total = np.where(workers > 0, beside, compute + data)
        times = np.log(total)
        for i, j, size in self.interactions:
            times = times + rows[:, i] * rows[:, j] * size
        return times

    def log_time(self, on: frozenset[str]) -> float:
        return float(self.log_times(self.space.rows([on]))[0])

    def best(self) -> float:
        """Returns the least log time of an allowed set."""
        return self.log_time(self.best_keys)

    @cached_property
    def best_keys(self) -> frozenset[str]:
        """Returns the fastest allowed set, also of a space that a search would not enumerate."""
        with mock.patch("flatout.tune.space.MAX_ENUMERATED", 10**6):
            rows = replace(self.space).allowed_sets
        assert rows is not None
        return self.space.keys(rows[int(np.argmin(self.log_times(rows)))])


def draw_program(
    rng: np.random.Generator, measured: dict[str, list[float]], informed: bool, workers: int = 0
) -> Program:
    """Generates a program. ``informed``: priors have the measured mean and spread; otherwise mean 0.

    ``workers`` of its own loader. With any, the program waits for data that takes longer than the compute.
    """

    def draw(lever: str) -> float:
        return float(rng.choice(measured[lever]) + JITTER * rng.standard_normal())

    data_bound = bool(rng.random() < 0.4) or workers > 0
    malloc = draw("malloc")
    chosen: list[tuple[str, str, bool, bool, float]] = []  # key, lever, live, warms up, effect
    for at, key in enumerate(rng.permutation(np.array(MALLOCS[: 2 + int(rng.random() < 0.3)], dtype=object))):
        chosen.append(
            (key, "malloc", False, False, malloc if at == 0 else malloc * float(rng.uniform(-0.3, 1.0)))
        )
    if data_bound:
        chosen += [
            *((f"loader={n}", "loader", False, False, 0.0) for n in ((0, workers + 1) if workers else (1,))),
            ("cached_prefix", "cached_prefix", False, False, math.log(rng.uniform(0.05, 0.7))),
            ("batched_transforms", "batched_transforms", False, False, math.log(rng.uniform(0.1, 0.9))),
        ]
    if rng.random() < 0.5:
        chosen.append(("compile", "compile", True, True, draw("compile") - abs(float(rng.normal(0, 0.1)))))
    chosen += [
        ("threads=1", "threads", True, False, draw("threads")),
        ("gc_pause", "gc_pause", True, False, draw("gc_pause")),
        ("fused_optimizer", "fused_optimizer", True, False, draw("fused_optimizer")),
    ]
    if rng.random() < 0.6:
        chosen.append(("channels_last", "channels_last", True, False, draw("channels_last")))
    pool = [
        effect
        for lever in ("channels_last", "gc_pause", "fused_optimizer", "debug_off")
        for effect in measured[lever]
    ]
    chosen += [
        (
            lever,
            lever,
            True,
            False,
            float((rng.random() < 0.5) * rng.choice(pool) + JITTER * rng.standard_normal()),
        )
        for lever in LIVE_ELSEWHERE
        if rng.random() < 0.5
    ]
    shares = (1.0, 0.0, 0.0)
    if data_bound:
        low, high = (0.5, 0.75) if workers else (0.05, 0.65)
        data, fetch = float(rng.uniform(low, high)), float(rng.uniform(0.2, 0.8))
        shares = (1 - data, data * fetch, data * (1 - fetch))
    factors = tuple(
        Factor(key, lever, live, *_prior(lever, measured, informed), warms_up=warms)
        for key, lever, live, warms, _ in chosen
    )
    pairs = [rng.choice(len(factors), 2, replace=False) for _ in range(int(rng.integers(1, 4)))]
    space = Space(factors, frozenset({frozenset(("compile", "inplace"))}), {}, KNOWN_PAIRS)
    return Program(
        space,
        np.array([effect for *_, effect in chosen]),
        shares,
        tuple((int(i), int(j), float(rng.normal(0, 0.05))) for i, j in pairs),
        float(rng.uniform(0.05, 0.3)),
        luck=float(rng.uniform(0.02, 0.07)),
        noise=float(rng.uniform(0.02, 0.08)),
        drift=float(rng.uniform(0, 0.02)),
        work=float(rng.uniform(0.05, 0.2)) if rng.random() < 0.3 else 0.0,
        outliers=float(rng.uniform(0, 0.05)),
        workers=workers,
    )


def _prior(lever: str, measured: dict[str, list[float]], informed: bool) -> tuple[float, float]:
    """Returns mean and sd of the effect on a program that has not been measured."""
    known: Sequence[float] = measured.get(lever, ())
    if not informed or len(known) < 3:
        return 0.0, EVERY_LEVER_HAS
    spread = math.hypot(float(np.std(known, ddof=1)) * math.sqrt(1 + 1 / len(known)), JITTER)
    return float(np.mean(known)), max(spread, 0.5 * EVERY_LEVER_HAS)


@dataclass
class Machine:
    """Runs one program: its clock, its disturbances, and the process-to-process variation.

    ``process_s``: from a start to the first block.
    """

    program: Program
    rng: np.random.Generator
    process_s: float
    block_s: float
    now_s: float = 0.0
    walk: float = 0.0
    wave: float = 0.0
    drift_at_s: float = 0.0
    luck: list[float] = field(default_factory=list)
    work: dict[int, float] = field(default_factory=dict)

    def start(self, *sets: frozenset[str], together: float = 1.3) -> list[int]:
        """Starts new processes under these sets and returns their numbers.

        Two that start together take ``together`` times the time of one.
        """
        longest = max(self.process_s + (WARM_UP_S if "compile" in on else 0.0) for on in sets)
        self.now_s += longest * (1 + (together - 1) * (len(sets) - 1))
        self.luck += [float(self.program.luck * self.rng.standard_normal()) for _ in sets]
        return list(range(len(self.luck) - len(sets), len(self.luck)))

    def block_ms(self, process: int, on: frozenset[str], window: int) -> float:
        """Returns the milliseconds a step of one block."""
        self.now_s += self.block_s
        passed, self.drift_at_s = self.now_s - self.drift_at_s, self.now_s
        keep, program, rng = math.exp(-passed / 20), self.program, self.rng
        self.wave = keep * self.wave + program.drift * math.sqrt(1 - keep**2) * rng.standard_normal()
        self.walk += program.drift * math.sqrt(passed / 100) * rng.standard_normal()
        if window not in self.work:
            self.work[window] = program.work * rng.standard_normal()
        noise = program.noise * rng.standard_t(3) / math.sqrt(3) + (
            rng.random() < program.outliers
        ) * rng.uniform(0.2, 0.8)
        return float(
            100
            * math.exp(
                program.log_time(on) + self.luck[process] + self.wave + self.walk + self.work[window] + noise
            )
        )
