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
from flatout.tune.endings import end_reason

TURNS = 4  # of each program in a pass
MAX_PROGRAMS = 8
TIMEOUT_S = 120.0
TURN_S = 0.7  # of one program while the others are paused
MIN_TICKS, MAX_TICKS = 2, 300  # of a turn
FREE_SHARE = 0.1  # of the limit to leave free: steps differ, and allocators round up
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
    startup_s: float
    tick_ms: float
    prefetched: int = 0
    turn_ms: list[float] = field(default_factory=list)

    @property
    def turn_s(self) -> float:
        return max(TURN_S, self.tick_ms / 1000)

    def measure_turn(self) -> None:
        """Time ticks for at most TURN_S, or one longer tick.

        Skips the first of several and the prefetched batches.
        """
        ticks = (
            min(MAX_TICKS, max(MIN_TICKS, round(1000 * TURN_S / max(self.tick_ms, 1e-3))))
            if self.tick_ms < 1000 * TURN_S
            else 1
        )
        times = self.trial.run_ticks(ticks, seconds() + TIMEOUT_S + 30 * self.turn_s, 4 * self.turn_s)
        discarded = min(max(1 if len(times) >= 4 else 0, self.prefetched), len(times) // 2)
        self.turn_ms.append(block_ms(times[discarded:]))


class SizeFailed(Exception):
    """A size that could not be measured. ``status`` and ``why`` belong to its point."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


def size_error(record: TrialRecord) -> SizeFailed:
    """Say how a program with another batch size failed."""
    output = (record.log_tail or record.reason).strip()
    message = record.error_line
    if record.exit_code == -9:
        return SizeFailed("out of memory", "killed by the kernel: the machine ran out of memory")
    if any(text in output for text in OUT_OF_MEMORY):
        return SizeFailed("out of memory", message)
    if record.status == "hung":
        return SizeFailed("no time", record.reason)
    if record.status == "ended":
        return SizeFailed("failed", "the program finished before its steps were steady")
    return SizeFailed("failed", f"the program fails with this size: {message}")


def mark_if_too_big(point: BatchPoint, record: BatchRecord) -> None:
    """Mark a size that ran but is too big."""
    if point.retries:
        point.status = "too big"
        point.why = f"the allocator had to empty its cache and retry {point.retries} times"
    elif record.limit_bytes and point.peak_bytes and point.peak_bytes > (1 - FREE_SHARE) * record.limit_bytes:
        point.status = "too big"
        point.why = f"its peak leaves less than {FREE_SHARE:.0%} of the memory ({record.limit_source}) free"


class BatchPrograms:
    """Starts, interleaves and ends programs. ``costs_s``: of a start, by size. Errors go to ``record``."""

    def __init__(
        self, command: Command, job: JobFolder, facts: Facts, record: BatchRecord, end_s: float
    ) -> None:
        self.command, self.job, self.facts, self.record = command, job, facts, record
        self.end_s = end_s
        self.costs_s: dict[int, float] = {}
        self.paused: list[BatchTrial] = []  # ready to be measured
        self.max_copies = 1
        self.prefetched = 0

    def plain_trial(self) -> Trial:
        """The program as it is, not started yet."""
        return Trial(self.command, self.job.new_trial(), Plan(), self.facts)

    def start_paused(self, size: int) -> BatchTrial:
        """A program at this size, steady and paused. Raises SizeFailed."""
        value = {"size": size, "loader": self.record.loader or 0}
        plan = Plan((Choice("batch_size", value, Origin.TUNER),) if size != self.record.own_size else ())
        trial = Trial(self.command, self.job.new_trial(), plan, self.facts)
        start_s = seconds()
        try:
            trial.start()
            ready = trial.wait_ready(max(self.end_s, start_s + TIMEOUT_S))
            self.max_copies = ready["max_copies"]
            record = trial.ask({"do": "record"}, seconds() + TIMEOUT_S)["record"]
            loaders = record["context"]["loaders"][value["loader"] :]
            actual_size = next((loader["batch_size"] for loader in loaders), None)
            if actual_size != size:
                why = f"the training loader still has batches of {actual_size} samples"
                reasons = (s["reason"] for s in record["skipped"] if s["name"] == "batch_size")
                raise SizeFailed("failed", next(reasons, why))
            trial.pause()
        except ProgramGone as gone:
            trial.close()
            raise size_error(gone.record) from None
        except BaseException:
            trial.close()
            raise
        self.costs_s[size] = seconds() - start_s
        self.paused.append(BatchTrial(size, trial, self.costs_s[size], ready["tick_ms"], self.prefetched))
        return self.paused[-1]

    def dismiss(self, programs: Sequence[BatchTrial]) -> None:
        for program in list(programs):
            program.trial.close()
            if program in self.paused:
                self.paused.remove(program)

    @property
    def max_together(self) -> int:
        return 0 if self.record.device != "cpu" else MAX_PROGRAMS

    def start_group(self, sizes: list[int]) -> list[BatchTrial]:
        """Start programs of the first sizes in ``sizes`` and remove these sizes from it."""
        group: list[BatchTrial] = []
        while sizes and (not group or (len(group) < self.max_together and self.max_copies > 2)):
            try:
                group.append(self.start_paused(sizes.pop(0)))
            except SizeFailed as error:
                self.record.notes.append(f"a program with another batch size did not restart: {error.why}")
        return group

    def take_turns(self, group: list[BatchTrial]) -> list[BatchTrial]:
        """Measure the programs forwards and backwards, then end them."""
        try:
            for program in group:
                program.turn_ms.clear()
            for turn in range(TURNS):
                for program in group if turn % 2 == 0 else group[::-1]:
                    program.measure_turn()
        except ProgramGone as gone:
            self.record.notes.append(f"a program ended while it was being measured: {end_reason(gone)}")
        finally:
            self.dismiss(group)
        return [program for program in group if program.turn_ms]
