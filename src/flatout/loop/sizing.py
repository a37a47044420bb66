"""Find the fastest micro-batch that fits, in the first steps of the real training, which all count.

Every size splits the same batches, so every step learns the same; only its time differs. Sizes start at the
whole batch and are halved. Each has warm-up steps that are not timed (allocators, caches, algorithm
selection). The search ends when two sizes in a row are slower than the best by a tenth. Then the best two are
measured again, interleaved, because sequential timings prove nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.memory import MemoryHeadroom, MicroBatches
from flatout.measure.clock import clock_for
from flatout.measure.statistics import median

if TYPE_CHECKING:
    from torch import device as Device

LOGGER = logging.getLogger("flatout")
WARM_STEPS, TIMED_STEPS, DUEL_ROUNDS = 2, 4, 3
MAX_SLOWDOWN = 1.1
TIE_RATIO = 1.02  # counts as equal: the smaller size wins, because it needs less memory


@dataclass(frozen=True)
class SizingSample:
    """Result of a step.

    ``fits`` is False after an out-of-memory error, an allocator retry, or too high a peak."""

    ms: float
    fits: bool = True


@dataclass(frozen=True)
class Sized:
    """The chosen size, and the time per step in ms of every size tried; None if it did not fit."""

    micro_batch: int
    ms: dict[int, float | None]

    def sentence(self) -> str:
        tried = ", ".join(
            f"{size}: {'does not fit' if ms is None else f'{ms:.3g} ms'}" for size, ms in self.ms.items()
        )
        return f"micro-batches of {self.micro_batch} samples are the fastest that fit ({tried})"


Sizing = Generator[int, SizingSample, Sized]


def search_fastest(size: int) -> Sizing:
    """Yields the micro-batch for the next step, receives the result, and returns the choice."""
    ms: dict[int, float | None] = {}
    slower_in_a_row, candidate = 0, size
    while True:
        ms[candidate] = yield from _timed(candidate, TIMED_STEPS)
        best = min((time_ms for time_ms in ms.values() if time_ms is not None), default=None)
        candidate_ms = ms[candidate]
        is_slower = candidate_ms is not None and best is not None and candidate_ms > MAX_SLOWDOWN * best
        slower_in_a_row = slower_in_a_row + 1 if is_slower else 0
        if candidate == 1 or slower_in_a_row == 2:
            break
        candidate = -(-candidate // 2)
    fitting = sorted((time_ms, size) for size, time_ms in ms.items() if time_ms is not None)
    if len(fitting) < 2:
        return Sized(fitting[0][1] if fitting else 1, ms)
    return Sized((yield from _duel(fitting[0][1], fitting[1][1])), ms)


def _timed(candidate: int, steps: int) -> Generator[int, SizingSample, float | None]:
    times = []
    for step in range(WARM_STEPS + steps):
        sample = yield candidate
        if not sample.fits:
            return None
        if step >= WARM_STEPS:
            times.append(sample.ms)
    return median(times)


def _duel(first: int, second: int) -> Generator[int, SizingSample, int]:
    times: dict[int, list[float]] = {first: [], second: []}
    for round_ in range(DUEL_ROUNDS):
        order: Sequence[int] = (first, second) if round_ % 2 == 0 else (second, first)
        for candidate in order:
            ms = yield from _timed(candidate, TIMED_STEPS)
            if ms is None:
                return second if candidate == first else first
            times[candidate].append(ms)
    faster, slower = sorted((first, second), key=lambda size: median(times[size]))
    return min(faster, slower) if median(times[slower]) <= TIE_RATIO * median(times[faster]) else faster


class Sizer:
    """Runs the search on real steps.

    ``step_begins`` sets the micro-batch of a step, ``step_ends`` reports its result."""

    def __init__(self, torch: ModuleType, device: Device, micro_batches: MicroBatches) -> None:
        self.micro_batches = micro_batches
        self.result: Sized | None = None
        self._clock, self._headroom = clock_for(torch, device), MemoryHeadroom(torch, device)
        self._search: Sizing | None = None
        self._start: Any = None
        self._failed = 0

    def step_begins(self, size: int) -> None:
        if self._search is None:
            self._search = search_fastest(size)
            self.micro_batches.limit = next(self._search)
        self._failed = len(self.micro_batches.failed)
        self._start = self._clock.mark()

    def step_ends(self) -> None:
        assert self._search is not None
        end = self._clock.mark()
        self._clock.synchronize()
        fits = len(self.micro_batches.failed) == self._failed and self._headroom.is_enough()
        ms = self._clock.elapsed_ms(self._start, end)
        try:
            self.micro_batches.limit = self._search.send(SizingSample(ms, fits))
        except StopIteration as stop:
            self.result = stop.value
            self.micro_batches.set_size(stop.value.micro_batch)
            LOGGER.info(stop.value.sentence())
