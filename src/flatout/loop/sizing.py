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
WARM_STEPS, TIMED_STEPS, TURNS = 2, 4, 3
SLOWER = 1.1
EQUAL = 1.02  # counts as equal: the smaller size wins, because it needs less memory


@dataclass(frozen=True)
class SizingSample:
    """Result of a step.

    ``fits`` is False after an out-of-memory error, an allocator retry, or too high a peak.
    """

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


def fastest(size: int) -> Sizing:
    """Yields the micro-batch for the next step, receives the result, and returns the choice."""
    ms: dict[int, float | None] = {}
    worse, candidate = 0, size
    while True:
        ms[candidate] = yield from _timed(candidate, TIMED_STEPS)
        best = min((each for each in ms.values() if each is not None), default=None)
        now = ms[candidate]
        worse = worse + 1 if now is not None and best is not None and now > SLOWER * best else 0
        if candidate == 1 or worse == 2:
            break
        candidate = -(-candidate // 2)
    fitting = sorted((each, tried) for tried, each in ms.items() if each is not None)
    if len(fitting) < 2:
        return Sized(fitting[0][1] if fitting else 1, ms)
    return Sized((yield from _duel(fitting[0][1], fitting[1][1])), ms)


def _timed(candidate: int, steps: int) -> Generator[int, SizingSample, float | None]:
    """The median time of some steps after warm-up; None as soon as one did not fit."""
    times = []
    for step in range(WARM_STEPS + steps):
        seen = yield candidate
        if not seen.fits:
            return None
        if step >= WARM_STEPS:
            times.append(seen.ms)
    return median(times)


def _duel(first: int, second: int) -> Generator[int, SizingSample, int]:
    times: dict[int, list[float]] = {first: [], second: []}
    for turn in range(TURNS):
        order: Sequence[int] = (first, second) if turn % 2 == 0 else (second, first)
        for candidate in order:
            ms = yield from _timed(candidate, TIMED_STEPS)
            if ms is None:
                return second if candidate == first else first
            times[candidate].append(ms)
    fast, slow = sorted((first, second), key=lambda each: median(times[each]))
    return min(fast, slow) if median(times[slow]) <= EQUAL * median(times[fast]) else fast


class Sizer:
    """Runs the search on real steps.

    ``step_begins`` sets the micro-batch of a step, ``step_ends`` reports its result.
    """

    def __init__(
        self,
        torch: ModuleType,
        device: Device,
        micro_batches: MicroBatches,
    ) -> None:
        self.micro_batches = micro_batches
        self.found: Sized | None = None
        self._clock, self._room = clock_for(torch, device), MemoryHeadroom(torch, device)
        self._search: Sizing | None = None
        self._start: Any = None
        self._failed = 0

    def step_begins(self, size: int) -> None:
        if self._search is None:
            self._search = fastest(size)
            self.micro_batches.limit = next(self._search)
        self._failed = len(self.micro_batches.failed)
        self._start = self._clock.mark()

    def step_ends(self) -> None:
        assert self._search is not None
        end = self._clock.mark()
        self._clock.synchronize()
        fits = len(self.micro_batches.failed) == self._failed and self._room.left()
        ms = self._clock.elapsed_ms(self._start, end)
        try:
            self.micro_batches.limit = self._search.send(SizingSample(ms, fits))
        except StopIteration as over:
            self.found = over.value
            self.micro_batches.settle_on(over.value.micro_batch)
            LOGGER.info(over.value.sentence())
