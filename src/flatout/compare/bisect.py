"""Finds the commit that made a program slower, larger in memory, or changed its losses.

The good and the bad revision are compared first. Then each test compares the good revision with a commit in
the middle of what is left, and asks on which side of the half of the whole change it lies. Commits that fail
are skipped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flatout.compare.evaluate import LEVEL, compare_losses
from flatout.compare.pairs import Pair, PairTimer
from flatout.compare.sides import Side
from flatout.guard.verdict import repeats_itself
from flatout.measure.clock import seconds
from flatout.measure.student import Estimate, estimate
from flatout.schema.compare import BisectRecord, TestedCommit
from flatout.schema.errors import FlatoutError, NothingMeasured

SMALLEST = 0.01  # change of time or memory that can be searched for

Measure = Callable[[Side, Side], PairTimer]


class Bisection:
    """One search. ``timer`` makes the measurement of two sides; ``effort``: seconds and fewest pairs of each."""

    def __init__(
        self,
        record: BisectRecord,
        side_at: Callable[[str], Side],
        subject: Callable[[str], str],
        timer: Measure,
        effort: tuple[float, int],
        save: Callable[[], None],
    ) -> None:
        self.record, self.side_at, self.subject, self.timer = record, side_at, subject, timer
        (self.budget_s, self.fewest), self.save = effort, save

    def run(self, commits: Sequence[str]) -> None:
        """Search ``commits``, of which the last is the bad one. Raises NothingMeasured without a change."""
        record = self.record
        good = self.side_at(record.good)
        half = self._whole_change(good, self.side_at(commits[-1]))
        low, high, skipped = -1, len(commits) - 1, set[int]()
        while left := [at for at in range(low + 1, high) if at not in skipped]:
            at = min(left, key=lambda each: abs(each - (low + high) / 2))
            tested = self._test(good, commits[at], half)
            record.tested.append(tested)
            if tested.verdict == "good":
                low = at
            elif tested.verdict == "bad":
                high = at
            else:
                skipped.add(at)
            self.save()
        record.first_bad = [self._named(commits[at]) for at in range(low + 1, high + 1)]

    def _named(self, commit: str) -> TestedCommit:
        known = next((each for each in self.record.tested if each.commit == commit), None)
        return known or TestedCommit(commit, self.subject(commit), "bad")

    def _whole_change(self, good: Side, bad: Side) -> float:
        """Measure good against bad; return half of the change as a logarithm."""
        if self.record.what == "losses":
            if not self._losses_differ(good, bad, first=True):
                raise NothingMeasured(
                    "the losses of the good and the bad revision are bitwise equal, so there is no commit to find."
                )
            self.record.change = "losses differ"
            return 0.0
        pairs = self._pairs(good, bad, lambda pairs: self._of(pairs).half < abs(self._of(pairs).mean) / 4)
        seen = self._of(pairs)
        if not seen.low > math.log1p(SMALLEST):
            raise NothingMeasured(
                f"the bad revision does not take certainly more {self.record.what} than the good one "
                f"({_interval(seen)} %). Give a longer --budget, or other revisions."
            )
        self.record.change = f"{100 * math.expm1(seen.mean):+.1f} % ({_interval(seen)})"
        return seen.mean / 2

    def _test(self, good: Side, commit: str, half: float) -> TestedCommit:
        tested = TestedCommit(commit, self.subject(commit), "skipped")
        try:
            side = self.side_at(commit)
            if self.record.what == "losses":
                differ = self._losses_differ(good, side)
                tested.verdict, tested.why = (
                    ("bad", "losses differ") if differ else ("good", "losses are equal")
                )
                return tested
            pairs = self._pairs(
                good, side, lambda pairs: not self._of(pairs).low <= half <= self._of(pairs).high
            )
        except FlatoutError as error:
            tested.why = str(error).splitlines()[0]
            return tested
        seen = self._of(pairs)
        inside = seen.low <= half <= seen.high
        tested.verdict = "cannot tell" if inside else "bad" if seen.mean > half else "good"
        tested.why = f"{_interval(seen)} %, n={seen.n}"
        return tested

    def _pairs(self, good: Side, other: Side, enough: Callable[[Sequence[Pair]], bool]) -> list[Pair]:
        return self.timer(good, other).run(seconds() + self.budget_s, enough, self.fewest)

    def _of(self, pairs: Sequence[Pair]) -> Estimate:
        if self.record.what == "time":
            return estimate([pair.log_change for pair in pairs], LEVEL)
        peaks = [
            (p.a.record.peak_memory_bytes, p.b.record.peak_memory_bytes) for p in pairs if p.b is not None
        ]
        return estimate([math.log(y / x) for x, y in peaks if x and y] or [0.0], LEVEL)

    def _losses_differ(self, good: Side, other: Side, first: bool = False) -> bool:
        """Compare the losses of one pair bit by bit.

        ``first``: also run the good revision again. Raises NothingMeasured if it then has other losses.
        """
        timer = self.timer(good, other)
        (pair,) = timer.run(seconds() + self.budget_s, lambda pairs: True, 1)
        assert pair.b is not None  # there are two sides
        found = compare_losses([pair.a.record], [pair.b.record], None)
        if found.verdict == "not compared":
            raise NothingMeasured(f"the losses cannot be compared: {found.why}.")
        if found.verdict == "same bits":
            return False
        again = timer.again(0) if first else None
        if again is not None and not repeats_itself(pair.a.record, again):
            raise NothingMeasured(
                "the good revision does not repeat itself: a second run with its seed has other losses, so they "
                "name no commit. `flatout compare --rev GOOD..BAD` tells whether losses differ by more than the "
                "spread of seeds."
            )
        return True


def _interval(seen: Estimate) -> str:
    return f"{100 * math.expm1(seen.low):+.1f} to {100 * math.expm1(seen.high):+.1f}"
