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
from flatout.measure.statistics import Round, block_ms, compare
from flatout.schema.plan import Choice, Plan
from flatout.schema.records import Ratio, Record, TrialRecord
from flatout.trial.blocks import MOST_TICKS, LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.interleaver import Interleaver, ask_replica

LATE_TIMEOUT_S = 75.0  # a compiler may be at work
FEWEST_TURNS = 3
MOST_ROUNDS = 1000  # when the clock ends a comparison
COSTLY_TICK_MS = 300.0  # from here on a block is one or two ticks, too costly to discard
Row = tuple[Choice, ...] | None  # None: as the program started


@dataclass(frozen=True)
class ProgramRequest:
    """A program to start: plan with live levers, seed, live levers of each block, requested record.

    ``record``: "" for none, "record", or "draws" with a few samples fetched repeatedly for the guard.
    ``late``: after all blocks, the guard replays one step with these live levers.
    """

    plan: Plan
    rows: tuple[Row, ...]
    seed: int = 0
    record: str = ""
    late: tuple[Choice, ...] = ()

    def to_json(self) -> dict[str, Any]:
        rows = [None if row is None else [choice.to_json() for choice in row] for row in self.rows]
        return {
            "plan": self.plan.to_json(),
            "rows": rows,
            "seed": self.seed,
            "record": self.record,
            "late": [choice.to_json() for choice in self.late],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProgramRequest:
        rows = tuple(
            None if row is None else Plan.from_json({"choices": row}).choices for row in data["rows"]
        )
        return cls(
            Plan.from_json(data["plan"]),
            rows,
            data["seed"],
            data["record"],
            Plan.from_json({"choices": data["late"]}).choices,
        )


@dataclass
class MeasuredBlock(Record):
    """One block: index of its row, start in seconds, the program's tick then, and milliseconds a tick."""

    row: int
    at_s: float
    tick: int
    ms: float


@dataclass
class ProgramResult(Record):
    """The result of one program.

    ``gone``: how it ended before its rows were done. ``left_out``: a lever that could not be applied, and
    why.
    """

    blocks: list[MeasuredBlock] = field(default_factory=list)
    record: TrialRecord | None = None
    gone: TrialRecord | None = None
    left_out: Sequence[str] | None = None
    ready: dict[str, Any] = field(default_factory=dict)
    late: dict[str, Any] | None = None  # the guard's findings from replaying a late step
    start_s: float = 0.0  # until it was ready, without the costs that later programs do not have
    ticks: int = 0  # of training when it was last seen

    @property
    def whole(self) -> bool:
        return self.gone is None and self.left_out is None


@dataclass
class Member:
    """A running program among those that are interleaved."""

    trial: Trial
    rows: tuple[Row, ...]
    seen: ProgramResult
    now: Row = None  # the active live levers
    fresh: bool = True  # just started: no block has run yet


def measure_together(
    interleaver: Interleaver,
    asked: Sequence[ProgramRequest],
    until_s: float,
    timeout_s: float,
    beside: Sequence[Member] = (),
    share: float = math.inf,
) -> list[ProgramResult]:
    """Start these programs, interleave their rows with those ``beside``, take their records, end them.

    Raises nothing that is a program's fault. Measuring ends after ``share`` of the time of the starts, once
    all programs had ``FEWEST_TURNS``.
    """
    start_s = seconds()
    members = _started(interleaver, asked, timeout_s)
    enough_s = seconds() + share * (seconds() - start_s)
    due = [member for member in members if member.seen.whole] + list(beside)
    try:
        take_turns(interleaver, due, until_s, lambda: seconds() >= enough_s)
        for one, member in zip(asked, members, strict=True):
            if one.late and member.seen.whole:
                member.seen.late = _late_step(interleaver, member, one.late)
        ending = [
            (member, one.record)
            for one, member in zip(asked, members, strict=True)
            if one.record and member.seen.whole
        ]
        with ThreadPoolExecutor(max(1, len(ending))) as pool:  # each needs a second to end
            list(pool.map(lambda each: _record(*each), ending))
    finally:
        for member in members:
            interleaver.dismiss(member.trial)
    return [member.seen for member in members]


def _started(interleaver: Interleaver, asked: Sequence[ProgramRequest], timeout_s: float) -> list[Member]:
    trials = [interleaver.start(one.plan, one.seed) for one in asked]
    members = []
    for one, trial, gone in zip(asked, trials, interleaver.ready(trials, timeout_s), strict=True):
        start_s = seconds() - trial.started_s - trial.ready.get("once_s", 0.0)
        seen = ProgramResult(
            gone=gone.record if gone else None, ready=trial.ready, start_s=start_s, ticks=trial.ticks_done
        )
        for left in trial.ready.get("skipped", ()):
            seen.left_out = left["name"], left["reason"]
        members.append(Member(trial, one.rows, seen))
    return members


def take_turns(
    interleaver: Interleaver,
    members: Sequence[Member],
    until_s: float,
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """Interleave the members' rows until they are done or time is up; at least one block each.

    After FEWEST_TURNS, ``enough`` may end it too. A member that fails or ends leaves.
    """
    for turn in range(max((len(member.rows) for member in members), default=0)):
        due = [member for member in members if turn < len(member.rows) and member.seen.whole]
        furthest = _same_tick(due) if turn == 0 else 0
        due = due if turn % 2 == 0 else due[::-1]
        slices = _slices(interleaver, due)
        for group in [due] if slices > 1 else [[member] for member in due]:
            if turn and (seconds() >= until_s or (turn >= FEWEST_TURNS and enough())):
                return
            _blocks(interleaver, group, turn, furthest, slices)


def alternate(
    interleaver: Interleaver,
    trials: Sequence[Trial],
    until_s: float,
    enough: Callable[[Sequence[tuple[float, ...]]], bool] = lambda rounds: False,
) -> list[ProgramResult]:
    """Alternate blocks of running programs until the clock, ``enough`` rounds, or the end of one ends it."""
    members = [Member(trial, (None,) * MOST_ROUNDS, ProgramResult()) for trial in trials]
    found = [member.seen for member in members]

    def done() -> bool:
        return not all(each.whole for each in found) or enough(whole_rounds(found))

    take_turns(interleaver, members, until_s, done)
    return found


def whole_rounds(found: Sequence[ProgramResult]) -> list[tuple[float, ...]]:
    """Milliseconds a tick of each program in the rounds that all of them finished."""
    return list(zip(*([block.ms for block in each.blocks] for each in found), strict=False))


def compared(interleaver: Interleaver, a: Trial, b: Trial, until_s: float) -> Ratio:
    """Compare two running programs until the clock ends it, with at least one round.

    Raises ProgramGone if one is lost. If one ends after a round, what was measured stays.
    """
    found = alternate(interleaver, (a, b), until_s)
    rounds = whole_rounds(found)
    for each in found:
        if each.gone is not None and not (each.gone.status == "ended" and rounds):
            raise ProgramGone(each.gone)
    return compare([[Round(x, y) for x, y in rounds]])


def _same_tick(due: Sequence[Member]) -> int:
    """Return the tick at which programs that started together begin.

    Sentences and episodes differ in length; with one seed, programs do the same work at the same tick.
    """
    return max((member.trial.ticks_done for member in due if member.fresh), default=0)


def _slices(interleaver: Interleaver, due: Sequence[Member]) -> int:
    """Into how many slices these members cut their blocks. On a GPU a pause would empty the queue of kernels."""
    on_cpu = all(member.trial.ready.get("device") == "cpu" for member in due)
    return interleaver.slices if len(due) > 1 and on_cpu else 1


def _blocks(interleaver: Interleaver, group: Sequence[Member], turn: int, furthest: int, slices: int) -> None:
    """Run the block of one row of each member; their slices alternate.

    Other tenants of a shared machine slow it down for parts of a second: in short slices, all members alike.
    """
    for member in group:
        with _outcome(member):
            _settle(interleaver, member, turn, furthest)
    at_s, ticks = seconds(), [member.trial.ticks_done for member in group]
    times: list[list[float]] = [[] for _ in group]
    ends = [interleaver.block_ticks * at // slices for at in range(slices + 1)]
    for at, (start, end) in enumerate(itertools.pairwise(ends)):
        for member, mine in list(zip(group, times, strict=True))[:: 1 if at % 2 == 0 else -1]:
            if member.seen.whole:
                with _outcome(member):
                    mine += interleaver.times(member.trial, end - start)
    for member, tick, mine in zip(group, ticks, times, strict=True):
        if member.seen.whole:
            member.seen.blocks.append(MeasuredBlock(turn, at_s, tick, block_ms(mine)))


@contextmanager
def _outcome(member: Member) -> Iterator[None]:
    """Note how far the program is, and whether it is lost."""
    try:
        yield
    except ProgramGone as gone:
        member.seen.gone = gone.record
    except LeverFailed as failed:
        member.seen.left_out = failed.name, failed.reason
    member.seen.ticks = member.trial.ticks_done


def _settle(interleaver: Interleaver, member: Member, turn: int, furthest: int) -> None:
    """Switch to the levers of a row, and run to where its block begins.

    The block ends at the end of a tick window, whether or not levers were switched.
    """
    trial, row = member.trial, member.rows[turn]
    switched = row is not None and row != member.now
    if switched:
        interleaver.switch(trial, row or ())
        member.now = row
    if member.fresh:
        interleaver.catch_up(trial, furthest)
        if interleaver.tick_ms < COSTLY_TICK_MS and interleaver.longest_ticks == MOST_TICKS:
            # Its first third of a second is slower: memory is touched for the first time
            interleaver.run(trial, interleaver.block_ticks)
        member.fresh = False
    settle = interleaver.window_ticks - interleaver.block_ticks
    before = -(trial.ticks_done + interleaver.block_ticks) % interleaver.window_ticks
    before += interleaver.window_ticks if switched and before < settle else 0
    if before:
        interleaver.run(trial, before)


def step_again(
    interleaver: Interleaver, trial: Trial, choices: Sequence[Choice], timeout_s: float, rest: bool = True
) -> dict[str, Any]:
    """Replay a step for the guard with these levers, the most valuable first. Raises ProgramGone.

    ``rest``: also judge what is left if levers fail. Returns the verdict, and the levers to leave out
    (`flatout.guard.replica.narrowed`).
    """
    interleaver.switch(trial, ())
    return ask_replica(trial, choices, timeout_s, rest)


def _late_step(interleaver: Interleaver, member: Member, choices: Sequence[Choice]) -> dict[str, Any]:
    timeout_s = 60 + 40 * interleaver.tick_ms / 1000 + LATE_TIMEOUT_S
    try:
        found = step_again(interleaver, member.trial, choices, timeout_s, rest=False)
    except (ProgramGone, LeverFailed) as error:
        return {"failure": str(error)}
    alone = list(found.get("alone", {}).items())
    for check in found.get("checks", ()):
        if not check["passed"] and 0 < len(alone) < len(choices):
            check["why"] = f"under {alone[0][0]} alone, {alone[0][1]}"
    return found


def _record(member: Member, how: str) -> None:
    """Take its record; if the program was lost on the way, store that as ``gone``."""
    record = member.trial.finish(draws=how == "draws")
    if record.status in ("finished", "ended"):
        member.seen.record = record
    else:
        member.seen.gone = record
