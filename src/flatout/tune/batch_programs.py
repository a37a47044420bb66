"""The programs of `flatout batch`: one per size, as many alive as memory allows, one running at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.statistics import block_ms
from flatout.schema.batch import BatchPoint, BatchRecord
from flatout.schema.enums import Origin
from flatout.schema.facts import Facts
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import TrialRecord
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.gone import why_gone

TURNS = 4  # of each program in a pass
MOST_TOGETHER = 8
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
            f"its peak leaves less than {MARGIN:.0%} of the memory ({record.limit_source}) free",
        )


class Programs:
    """Starts, pauses, interleaves and ends programs.

    ``costs_s`` is the cost of starting a program, by size; errors go to ``record``.
    """

    def __init__(
        self, command: Command, job: JobFolder, facts: Facts, record: BatchRecord, end_s: float
    ) -> None:
        self.command, self.job, self.facts, self.record = command, job, facts, record
        self.end_s = end_s
        self.costs_s: dict[int, float] = {}
        self.alive: list[BatchTrial] = []  # paused and ready to be measured
        self.copies = 1
        self.prefetched = 0

    def own(self) -> Trial:
        """Return the program as it is, not started yet."""
        return Trial(self.command, self.job.new_trial(), Plan(), self.facts)

    def enter(self, size: int) -> BatchTrial:
        """Return a program at this size, steady and paused. Raises DidNotRun."""
        plan = (
            Plan()
            if size == self.record.own_size
            else Plan(
                (Choice("batch_size", {"size": size, "loader": self.record.loader or 0}, Origin.TUNER),)
            )
        )
        trial = Trial(self.command, self.job.new_trial(), plan, self.facts)
        start_s = seconds()
        try:
            trial.start()
            ready = trial.wait_ready(max(self.end_s, start_s + TIMEOUT_S))
            self.copies = ready["copies"]
            seen = trial.ask({"do": "record"}, seconds() + TIMEOUT_S)["record"]
            got = next(
                (loader["batch_size"] for loader in seen["context"]["loaders"][self.record.loader or 0 :]),
                None,
            )
            if got != size:
                said = [each["reason"] for each in seen["skipped"] if each["name"] == "batch_size"]
                raise DidNotRun(
                    "failed", said[0] if said else f"the training loader still has batches of {got} samples"
                )
            trial.hold()
        except ProgramGone as gone:
            trial.close()
            raise did_not_run(gone.record) from None
        except BaseException:
            trial.close()
            raise
        self.costs_s[size] = seconds() - start_s
        self.alive.append(BatchTrial(size, trial, self.costs_s[size], ready["tick_ms"], self.prefetched))
        return self.alive[-1]

    def dismiss(self, visits: Sequence[BatchTrial]) -> None:
        for visit in list(visits):
            visit.trial.close()
            if visit in self.alive:
                self.alive.remove(visit)

    @property
    def together(self) -> int:
        return 0 if self.record.device != "cpu" else MOST_TOGETHER

    def entered(self, left: list[int]) -> list[BatchTrial]:
        """Start programs of the first sizes in ``left`` and remove these sizes from it."""
        group: list[BatchTrial] = []
        while left and (not group or (len(group) < self.together and self.copies > 2)):
            try:
                group.append(self.enter(left.pop(0)))
            except DidNotRun as error:
                self.record.notes.append(f"a program with another batch size did not restart: {error.why}")
        return group

    def take_turns(self, group: list[BatchTrial]) -> list[BatchTrial]:
        """Measure the programs forwards and backwards, then end them."""
        try:
            for visit in group:
                visit.turns.clear()
            for turn in range(TURNS):
                for visit in group if turn % 2 == 0 else group[::-1]:
                    visit.turn()
        except ProgramGone as gone:
            self.record.notes.append(f"a program ended while it was being measured: {why_gone(gone)}")
        finally:
            self.dismiss(group)
        return [visit for visit in group if visit.turns]
