"""Starts programs together and interleaves their blocks: the basis of every comparison of a search.

Each program has *rows*: the live levers of each of its blocks. In every round each program runs the block of
its next row; the order alternates from round to round (A B B A). Where pauses do not disturb a program, these
blocks are cut into short slices that alternate too. Programs compared in one call run on one machine. A call is
JSON both ways, so it can run on another machine.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flatout.measure.clock import seconds
from flatout.measure.load import busy_cores
from flatout.measure.statistics import Round, block_ms, compare
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio, Record, TrialRecord
from flatout.trial.blocks import MAX_TICKS, LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.interleaver import Interleaver, ask_replica

LATE_TIMEOUT_S = 75.0  # a compiler may be at work
MIN_TURNS = 3
LOAD_SAMPLE_S = 0.05
MAX_ROUNDS = 1000  # when the clock ends a comparison
COSTLY_TICK_MS = 300.0  # from here on a block is one or two ticks, too costly to discard
COLD_STOP_S = 15.0  # after a longer stop, queues and caches are cold again
# A cold tick takes longer than COLD_FACTOR times a warm one; FLAT_TICKS later it takes less than FALLING times that.
COLD_FACTOR, FALLING, FLAT_TICKS, MAX_COLD_TICKS = 1.3, 0.85, 2, 8
LiveLevers = tuple[Choice, ...] | None  # of one block; None: as the program started


@dataclass(frozen=True)
class ProgramRequest:
    """A program to start: plan with live levers, seed, live levers of each block, requested record.

    ``record``: "" for none, "record", or "with samples": also a few samples fetched repeatedly, for the guard.
    ``late_levers``: after all blocks, the guard replays one step with these live levers. ``min_ticks``: train at
    least so long before the record is taken, if the time allows.
    """

    plan: Plan
    rows: tuple[LiveLevers, ...]
    seed: int = 0
    record: str = ""
    late_levers: tuple[Choice, ...] = ()
    min_ticks: int = 0

    def to_json(self) -> dict[str, Any]:
        def words(row: LiveLevers) -> Any:
            return None if row is None else [choice.to_json() for choice in row]

        rows, late_levers = list(map(words, self.rows)), words(self.late_levers)
        return {**vars(self), "plan": self.plan.to_json(), "rows": rows, "late_levers": late_levers}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProgramRequest:
        def choices(row: Any) -> Any:
            return None if row is None else Plan.from_json({"choices": row}).choices

        rows, late_levers = tuple(map(choices, data["rows"])), choices(data["late_levers"])
        return cls(**{**data, "plan": Plan.from_json(data["plan"]), "rows": rows, "late_levers": late_levers})


@dataclass
class MeasuredBlock(Record):
    """One block: index of its row, start in seconds, the program's tick then, and milliseconds a tick.

    ``busy``: cores that other processes used right before and after.
    """

    row: int
    at_s: float
    tick: int
    ms: float
    busy: float = 0.0


@dataclass
class ProgramResult(Record):
    """The result of one program.

    ``end_record``: how it ended before its rows were done. ``failed_lever``: its name, and why.
    """

    blocks: list[MeasuredBlock] = field(default_factory=list)
    record: TrialRecord | None = None
    end_record: TrialRecord | None = None
    failed_lever: Sequence[str] | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    late_replica: dict[str, Any] | None = None  # the guard's findings from replaying a late step
    startup_s: float = 0.0  # until it was ready, without the costs that later programs do not have
    ticks: int = 0  # of training when it was last seen

    @property
    def complete(self) -> bool:
        return self.end_record is None and self.failed_lever is None


@dataclass
class Member:
    """A program that is interleaved with others."""

    trial: Trial
    rows: tuple[LiveLevers, ...]
    result: ProgramResult
    active_row: LiveLevers = None  # the active live levers
    fresh: bool = True  # just started: no block has run yet


def measure_together(
    interleaver: Interleaver,
    requests: Sequence[ProgramRequest],
    until_s: float,
    timeout_s: float,
    running: Sequence[Member] = (),
    max_startup_ratio: float = math.inf,
) -> list[ProgramResult]:
    """Start these programs, interleave their rows with those ``running``, take their records, end them.

    Raises nothing that is a program's fault. Once all programs had ``MIN_TURNS``, measuring takes at most
    ``max_startup_ratio`` times as long as the starts.
    """
    start_s = seconds()
    members = _start_members(interleaver, requests, timeout_s)
    min_end_s = seconds() + max_startup_ratio * (seconds() - start_s)
    active = [member for member in members if member.result.complete] + list(running)
    try:
        take_turns(interleaver, active, until_s, lambda: seconds() >= min_end_s)
        for request, member in zip(requests, members, strict=True):
            with _catch_end(member):
                while (
                    member.result.complete
                    and member.trial.ticks_done < request.min_ticks
                    and seconds() < until_s
                ):
                    interleaver.run(member.trial, 1)
            if request.late_levers and member.result.complete:
                member.result.late_replica = _late_step(interleaver, member, request.late_levers)
        finishing = [
            (member, request.record)
            for request, member in zip(requests, members, strict=True)
            if request.record and member.result.complete
        ]
        with ThreadPoolExecutor(max(1, len(finishing))) as pool:  # each needs a second to end
            list(pool.map(lambda finished: _record(*finished), finishing))
    finally:
        for member in members:
            interleaver.dismiss(member.trial)
    return [member.result for member in members]


def _start_members(
    interleaver: Interleaver, requests: Sequence[ProgramRequest], timeout_s: float
) -> list[Member]:
    trials = [interleaver.start(request.plan, request.seed) for request in requests]
    members = []
    for request, trial, gone in zip(
        requests, trials, interleaver.wait_all_ready(trials, timeout_s), strict=True
    ):
        startup_s = seconds() - trial.started_s - trial.ready.get("dataset_fetch_s", 0.0)
        result = ProgramResult(
            end_record=gone.record if gone else None,
            ready=trial.ready,
            startup_s=startup_s,
            ticks=trial.ticks_done,
        )
        for skipped in trial.ready.get("skipped", ()):
            result.failed_lever = skipped["name"], skipped["reason"]
        members.append(Member(trial, request.rows, result))
    return members


def take_turns(
    interleaver: Interleaver,
    members: Sequence[Member],
    until_s: float,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Interleave the members' rows until they are done or time is up; at least one block each.

    After MIN_TURNS, ``should_stop`` may end it too. A member that fails or ends leaves.
    """
    fresh = [member for member in members if member.fresh and member.rows and member.result.complete]
    # with one seed, programs do the same work at the same tick
    start_tick = max((member.trial.ticks_done for member in fresh), default=0)
    for turn in range(max((len(member.rows) for member in members), default=0)):
        active = [member for member in members if turn < len(member.rows) and member.result.complete]
        active = active if turn % 2 == 0 else active[::-1]
        slices = _slices(interleaver, active)
        for group in [active] if slices > 1 else [[member] for member in active]:
            if turn and (seconds() >= until_s or (turn >= MIN_TURNS and should_stop())):
                return
            _run_blocks(interleaver, group, turn, start_tick, slices)


def alternate(
    interleaver: Interleaver,
    trials: Sequence[Trial],
    until_s: float,
    should_stop: Callable[[Sequence[tuple[float, ...]]], bool] = lambda rounds: False,
) -> list[ProgramResult]:
    """Alternate blocks of running programs until the clock, ``should_stop`` or the end of one ends it."""
    members = [Member(trial, (None,) * MAX_ROUNDS, ProgramResult()) for trial in trials]
    results = [member.result for member in members]

    def done() -> bool:
        return not all(result.complete for result in results) or should_stop(complete_rounds(results))

    take_turns(interleaver, members, until_s, done)
    return results


def complete_rounds(results: Sequence[ProgramResult], limit: float = math.inf) -> list[tuple[float, ...]]:
    """Milliseconds a tick of each program in the rounds that all finished beside fewer busy cores than ``limit``."""
    return [
        tuple(block.ms for block in blocks)
        for blocks in zip(*(result.blocks for result in results), strict=False)
        if max(block.busy for block in blocks) < limit
    ]


def compare_running(interleaver: Interleaver, a: Trial, b: Trial, until_s: float) -> Ratio:
    """Compare two running programs until the clock ends it, with at least one round.

    Raises ProgramGone if one is lost. If one ends after a round, what was measured stays.
    """
    results = alternate(interleaver, (a, b), until_s)
    rounds = complete_rounds(results)
    for result in results:
        if result.end_record is not None and not (result.end_record.status == "ended" and rounds):
            raise ProgramGone(result.end_record)
    return compare([[Round(x, y) for x, y in rounds]])


def _slices(interleaver: Interleaver, active: Sequence[Member]) -> int:
    """Into how many slices these members cut their blocks. On a GPU a pause would empty the queue of kernels."""
    on_cpu = all(member.trial.ready.get("device") == "cpu" for member in active)
    return interleaver.slices if len(active) > 1 and on_cpu else 1


def _run_blocks(
    interleaver: Interleaver, group: Sequence[Member], turn: int, start_tick: int, slices: int
) -> None:
    """Run the block of one row of each member; their slices alternate."""
    before = busy_cores(LOAD_SAMPLE_S) or 0.0
    for member in group:
        with _catch_end(member):
            _settle(interleaver, member, turn, start_tick)
    at_s, ticks = seconds(), [member.trial.ticks_done for member in group]
    block_times: list[list[float]] = [[] for _ in group]
    ends = [interleaver.block_ticks * i // slices for i in range(slices + 1)]
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        for member, member_ms in list(zip(group, block_times, strict=True))[:: 1 if i % 2 == 0 else -1]:
            if member.result.complete:
                with _catch_end(member):
                    member_ms += interleaver.times(member.trial, end - start)
    busy = (before + (busy_cores(LOAD_SAMPLE_S) or 0.0)) / 2
    for member, tick, member_ms in zip(group, ticks, block_times, strict=True):
        if member.result.complete:
            member.result.blocks.append(MeasuredBlock(turn, at_s, tick, block_ms(member_ms), busy))


@contextmanager
def _catch_end(member: Member) -> Iterator[None]:
    try:
        yield
    except ProgramGone as gone:
        member.result.end_record = gone.record
    except LeverFailed as error:
        member.result.failed_lever = error.name, error.reason
    member.result.ticks = member.trial.ticks_done


def _settle(interleaver: Interleaver, member: Member, turn: int, start_tick: int) -> None:
    """Switch to the levers of a row, and run to where its block begins."""
    trial, row = member.trial, member.rows[turn]
    switched = row is not None and row != member.active_row
    if switched:
        interleaver.switch(trial, row or ())
        member.active_row = row
    stopped_long = seconds() - trial.stopped_s > COLD_STOP_S
    if member.fresh:
        interleaver.catch_up(trial, start_tick)
    if member.fresh or stopped_long:
        if interleaver.tick_ms < COSTLY_TICK_MS and interleaver.longest_ticks == MAX_TICKS:
            # The first third of a second is slower: memory is touched for the first time
            interleaver.run(trial, interleaver.block_ticks)
        elif not member.fresh or trial.ready["tick_ms"] > COLD_FACTOR * interleaver.tick_ms:
            _warm_up(interleaver, trial)
    member.fresh = False
    settle = interleaver.window_ticks - interleaver.block_ticks
    ticks_to_run = -(trial.ticks_done + interleaver.block_ticks) % interleaver.window_ticks
    ticks_to_run += interleaver.window_ticks if switched and ticks_to_run < settle else 0
    if ticks_to_run:
        interleaver.run(trial, ticks_to_run)


def _warm_up(interleaver: Interleaver, trial: Trial) -> None:
    """Run ticks one by one while they are slow and become faster: such a block would count as a lever's effect."""
    times: list[float] = []
    while len(times) < MAX_COLD_TICKS:
        times += trial.run_ticks(1, interleaver.deadline(1))
        flat = len(times) > FLAT_TICKS and times[-1] > FALLING * times[-1 - FLAT_TICKS]
        if times[-1] <= COLD_FACTOR * interleaver.tick_ms or flat:
            return


def replay_step(
    interleaver: Interleaver,
    trial: Trial,
    choices: Sequence[Choice],
    timeout_s: float,
    judge_remaining: bool = True,
) -> dict[str, Any]:
    """Replay a step for the guard with these levers, the most valuable first. Raises ProgramGone.

    ``judge_remaining``: also judge what is left if levers fail. Returns the verdict, and the levers to leave out
    (`flatout.guard.replica.blame_levers`).
    """
    interleaver.switch(trial, ())
    return ask_replica(trial, choices, timeout_s, judge_remaining)


def _late_step(interleaver: Interleaver, member: Member, choices: Sequence[Choice]) -> dict[str, Any]:
    timeout_s = 60 + 40 * interleaver.tick_ms / 1000 + LATE_TIMEOUT_S
    try:
        replica = replay_step(interleaver, member.trial, choices, timeout_s, judge_remaining=False)
    except (ProgramGone, LeverFailed) as error:
        return {"failure": str(error)}
    failures = list(replica.get("failing_alone", {}).items())
    for check in replica.get("checks", ()):
        if not check["passed"] and 0 < len(failures) < len(choices):
            check["why"] = f"under {failures[0][0]} alone, {failures[0][1]}"
    return replica


def _record(member: Member, record_kind: str) -> None:
    record = member.trial.finish(fetch_samples=record_kind == "with samples")
    if record.status in ("finished", "ended"):
        member.result.record = record
    else:
        member.result.end_record = record
