"""One program at one batch size: its timed turns, or the reason why it could not be measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.measure.clock import seconds
from flatout.measure.statistics import block_ms
from flatout.schema.batch import BatchPoint, BatchRecord
from flatout.schema.records import TrialRecord
from flatout.trial.parent import Trial

TIMEOUT_S = 120.0
TURN_S = 0.7  # of one program while the others are paused
FEWEST_TICKS, MOST_TICKS = 2, 300  # of a turn
MARGIN = 0.1  # of the limit to leave free: steps differ, and allocators round up
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "MemoryError",
    "Cannot allocate memory",
)


@dataclass
class BatchTrial:
    """A running program at one size, and its turns in milliseconds a step.

    ``prefetched`` is the number of batches that its workers may have ready.
    """

    size: int
    trial: Trial
    start_s: float
    tick_ms: float
    prefetched: int = 0
    turns: list[float] = field(default_factory=list)

    @property
    def turn_s(self) -> float:
        return max(TURN_S, self.tick_ms / 1000)

    def turn(self) -> None:
        """Time ticks for at most TURN_S, or one longer tick.

        Skips the first of several and the prefetched batches.
        """
        ticks = (
            min(MOST_TICKS, max(FEWEST_TICKS, round(1000 * TURN_S / max(self.tick_ms, 1e-3))))
            if self.tick_ms < 1000 * TURN_S
            else 1
        )
        times = self.trial.go(ticks, seconds() + TIMEOUT_S + 30 * self.turn_s, 4 * self.turn_s)
        skipped = min(max(1 if len(times) >= 4 else 0, self.prefetched), len(times) // 2)
        self.turns.append(block_ms(times[skipped:]))


class DidNotRun(Exception):
    """A size that could not be measured. ``status`` and ``why`` belong to its point."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def did_not_run(record: TrialRecord) -> DidNotRun:
    """Say how a program with another batch size failed."""
    said = (record.log_tail or record.reason).strip()
    last = said.splitlines()[-1].strip() if said else record.status
    if record.exit_code == -9:
        return DidNotRun("out of memory", "killed by the kernel: the machine ran out of memory")
    if any(words in said for words in OUT_OF_MEMORY):
        return DidNotRun("out of memory", last)
    if record.status == "hung":
        return DidNotRun("no time", record.reason)
    if record.status == "ended":
        return DidNotRun("failed", "the program finished before its steps were steady")
    return DidNotRun("failed", f"the program fails with this size: {last}")


def judge(point: BatchPoint, record: BatchRecord) -> None:
    """Mark a size that ran but is too big."""
    if point.retries:
        point.status, point.why = (
            "too big",
            f"the allocator had to empty its cache and retry {point.retries} times",
        )
    elif record.limit_bytes and point.peak_bytes and point.peak_bytes > (1 - MARGIN) * record.limit_bytes:
        point.status, point.why = (
            "too big",
            f"its peak leaves less than {MARGIN:.0%} of the memory ({record.limit}) free",
        )
