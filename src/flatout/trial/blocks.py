"""Runs blocks of ticks in a program, and compares two states of it: levers switched in the order A B B A.

Both sides of a comparison share the process, its memory and the disturbance by other processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, block_ms, compare
from flatout.schema.plan import Choice
from flatout.schema.records import Ratio
from flatout.trial.parent import Trial

BLOCK_MS = 350.0
SLICE_MS = 45.0  # shorter ones would mostly fill caches; in longer ones disturbances do not cancel
COLD_MS = 5.0  # of a program after a pause, until its caches are warm
SHORT_BLOCK_MS = 100.0
MAX_TICKS = 200
MIN_ROUNDS = 3
HANG_FACTOR = 30.0  # a block counts as hung after this many times its expected length
TIMEOUT_S = 60.0
MAX_BLOCK_FACTOR = 4.0  # times its expected length; other busy processes must not use up the budget
MAX_CATCH_UP_S = 3.0  # time limit for bringing a program to the same tick as the others
SLOW_TICK_MS = 2000.0  # from here on a round is one block a side
PREFETCHED_BATCHES = 3  # a loader worker has two batches ready and one in hand
CLEAR_LOSS = 0.99
CLEAR_WIN = 1.03


class LeverFailed(Exception):
    """A live lever could not be switched on in the running program."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name
        self.reason = reason


class Watcher:
    """Shows the progress of a search or a profile; by default every method does nothing."""

    def stage(self, name: str, detail: str = "") -> None: ...
    def set_end(self, end_s: float) -> None: ...
    def report(self, sentence: str) -> None: ...
    def comparison(self, plan: str, ratio: Ratio | None, note: str = "") -> None: ...


def decided(ratio: Ratio, rounds: int) -> bool:
    """Whether more rounds could not change the result."""
    return rounds >= MIN_ROUNDS and (ratio.high < CLEAR_LOSS or (ratio.low > CLEAR_WIN and rounds >= 6))


class BlockTimer:
    """Chooses the length of a block of this program, and compares blocks."""

    def __init__(self) -> None:
        self.tick_ms = 1.0
        self.unit = "step"
        self.prefetched_ticks = 0
        self.longest_ticks = MAX_TICKS  # of one block; fewer if the program ends soon
        self.core: int | None = None  # of the last block; the next one begins there
        self.settle_ticks = 1  # after a switch, until the step time is stable

    @property
    def block_ticks(self) -> int:
        """Ticks of one block: about `BLOCK_MS`, and more than loader workers have prefetched."""
        ticks = round(BLOCK_MS / max(self.tick_ms, 1e-3))
        if self.tick_ms < 500:
            ticks = max(ticks, 2 * self.prefetched_ticks)
        return max(1, min(self.longest_ticks, ticks))

    @property
    def window_ticks(self) -> int:
        """Ticks of a block and its settling.

        Programs with the same seed stay at the same tick, so an epoch's end falls into the same window of
        each.
        """
        return self.block_ticks + (self.settle_ticks if self.tick_ms < SLOW_TICK_MS else 0)

    @property
    def slices(self) -> int:
        """Into how many slices a block is cut when programs alternate within their blocks.

        One if processes work ahead or meet each other: a pause disturbs them.
        """
        if self.prefetched_ticks or self.settle_ticks > 1:
            return 1
        return max(1, min(self.block_ticks, round(1000 * self.block_s / SLICE_MS)))

    @property
    def block_s(self) -> float:
        return self.block_ticks * self.tick_ms / 1000

    def deadline(self, ticks: int) -> float:
        """The time at which this many ticks count as hung."""
        return seconds() + TIMEOUT_S + HANG_FACTOR * ticks * self.tick_ms / 1000

    def block(self, trial: Trial, from_tick: int = 0) -> float:
        """Run a block and return milliseconds a tick.

        First brings a program that is behind to ``from_tick``. Sentences, episodes and graphs differ in
        length: programs with the same seed do the same work only at the same tick.
        """
        self.catch_up(trial, from_tick)
        return block_ms(self.times(trial, self.block_ticks))

    def times(self, trial: Trial, ticks: int) -> list[float]:
        """Run these ticks, on the core of the last ones, and return the milliseconds of each.

        Leaves out the first ticks of a longer block: caches are cold after a pause.
        """
        max_s = MAX_BLOCK_FACTOR * max(ticks * self.tick_ms, BLOCK_MS) / 1000
        times = trial.run_ticks(ticks, self.deadline(ticks), max_s, self.core)
        self.core = trial.core
        cold = max(1 if len(times) >= 4 else 0, math.floor(COLD_MS / max(self.tick_ms, 1e-3)))
        return times[min(max(cold, self.prefetched_ticks), len(times) // 2) :]

    def _cache_ticks(self, tick_ms: float) -> int:
        """Ticks that warm the caches before a block of a side that is much faster than the plain program.

        Its block lasts only a few milliseconds, which is too short for it to warm them itself.
        """
        if self.block_ticks * tick_ms >= SHORT_BLOCK_MS or tick_ms > self.tick_ms / 2:
            return 0
        return min(self.longest_ticks, math.ceil(SHORT_BLOCK_MS / max(tick_ms, 1e-3)))

    def catch_up(self, trial: Trial, to_tick: int) -> None:
        """Run a program to a tick, if that takes at most a few seconds."""
        ticks_behind = to_tick - trial.ticks_done
        if 0 < ticks_behind * self.tick_ms / 1000 <= MAX_CATCH_UP_S:
            trial.run_ticks(ticks_behind, self.deadline(ticks_behind))

    def run(self, trial: Trial, ticks: int) -> float:
        """Run some ticks without measuring blocks; return the seconds."""
        start = seconds()
        trial.run_ticks(ticks, self.deadline(ticks) + 240)  # a compiler may be at work
        return seconds() - start

    def switch(self, trial: Trial, choices: Sequence[Choice], timeout_s: float = TIMEOUT_S) -> None:
        """Make exactly these live levers active.

        Raises LeverFailed if one cannot be switched on or has given up.
        """
        answer = trial.switch(choices, self.deadline(4) + timeout_s)
        for skipped in (*answer["skipped"], *answer["reports"]):
            raise LeverFailed(skipped["name"], skipped["reason"])

    def compare_live(
        self,
        trial: Trial,
        a: Sequence[Choice],
        b: Sequence[Choice],
        until_s: float,
        settle_ticks: int = 1,
        on_ratio: Callable[[Ratio], None] = lambda ratio: None,
        should_stop: Callable[[Ratio, int], bool] = decided,
    ) -> Ratio:
        """Compare B with A inside one program, with at least one round.

        Ends at ``until_s``, or early when ``should_stop(ratio, rounds)``.
        """
        rounds: list[Round] = []
        side_ms = {"a": self.tick_ms, "b": self.tick_ms}
        while True:
            times: dict[str, list[float]] = {"a": [], "b": []}
            order = "abba" if self.tick_ms < SLOW_TICK_MS else ("ab" if len(rounds) % 2 == 0 else "ba")
            active = ""
            for side in order:
                if side != active:
                    self.switch(trial, a if side == "a" else b)
                    self.run(trial, max(settle_ticks, self.settle_ticks, self._cache_ticks(side_ms[side])))
                    active = side
                side_ms[side] = self.block(trial)
                times[side].append(side_ms[side])
            rounds += [Round(x, y) for x, y in zip(times["a"], times["b"], strict=True)]
            ratio = compare([rounds])
            on_ratio(ratio)
            if seconds() >= until_s or should_stop(ratio, len(rounds)):
                return ratio
