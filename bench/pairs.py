"""Fresh processes that take turns, with flatout's own arena, for a benchmark that measures a claim again.

What the tuner says of itself is not used here: programs are started anew, and only the instrument (the baton, the clock, the
statistics) is the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import RESULTS  # noqa: F401  puts src on the path

from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, block_ms, compare
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.plan import Plan
from flatout.plan.records import Ratio, TrialRecord
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.arena import Arena, Entrant, ask_options

ROUNDS = 6
PATIENCE_S = 300.0
SETTLING_TICKS = 5


@contextmanager
def standing_in(folder: Path | str, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """In another folder, with more in the environment, and back again. Programs inherit both."""
    folder_before, environment_before = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(environment or {})
    try:
        yield
    finally:
        os.chdir(folder_before)
        os.environ.clear()
        os.environ.update(environment_before)


def enter(arena: Arena, plan: Plan, seed: int, patience_s: float = PATIENCE_S) -> Entrant:
    """Start a program, bring it to its steady state and learn how long its ticks are. Raises ProgramGone.

    A compiler may still have been at work when the program called itself steady, so the length of a tick is taken from a few
    more ticks.
    """
    entrant = arena.enter(plan, seed, patience_s)
    trial = entrant.trial
    try:
        arena.unit = trial.ready["unit"]
        arena.tick_ms = max(trial.ready["tick_ms"], 1e-3)
        if arena.tick_ms < 2000:
            arena.tick_ms = max(block_ms(trial.go(SETTLING_TICKS, seconds() + patience_s)), 1e-3)
        workers = max((loader["num_workers"] for loader in ask_options(trial)["scene"]["loaders"]), default=0)
        trial.hold()
        arena.prefetched_ticks = 3 * workers
    except BaseException:
        arena.dismiss(trial)
        raise
    return entrant


@dataclass
class Pairs:
    """Rounds of each pair of fresh processes, and how the pairs ended. ``ratio`` is A's time over B's."""

    rounds: list[list[Round]] = field(default_factory=list)
    records: list[tuple[TrialRecord, TrialRecord]] = field(default_factory=list)
    failure: str = ""

    @property
    def ratio(self) -> Ratio | None:
        return compare(self.rounds) if any(self.rounds) else None

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio
        return {"ratio": ratio.to_json() if ratio else None, "failure": self.failure, "rounds_ms": [[(r.a_ms, r.b_ms) for r in pair] for pair in self.rounds]}


def fresh_pairs(command: Command, a: Plan, b: Plan, job: JobFolder, facts: Facts, pairs: int = 3, rounds: int = ROUNDS, first_seed: int = 100,
                pair_s: float = 120.0, heard: Callable[[int, Pairs], None] = lambda at, found: None) -> Pairs:
    """Fresh pairs of processes, ``a`` against ``b``; who starts first changes from pair to pair. Seeds are none of the tuner's."""
    found = Pairs()
    arena = Arena(command, job, facts)
    try:
        for at in range(pairs):
            entrants: list[Entrant] = []
            try:
                for plan in (a, b) if at % 2 == 0 else (b, a):
                    entrants.append(enter(arena, plan, first_seed + at))
                first, second = (e.trial for e in (entrants if at % 2 == 0 else reversed(entrants)))
                found.rounds.append(arena.pair(first, second, rounds, seconds() + pair_s))
                found.records.append((first.finish(), second.finish()))
            except ProgramGone as gone:
                found.failure = last_line(gone.record)
                return found
            finally:
                for entrant in entrants:
                    arena.dismiss(entrant.trial)
            heard(at, found)
    finally:
        arena.close()
    return found


@dataclass
class SideOfContest:
    """One program of a contest of many: its command, its plan, and what was seen of it."""

    name: str
    command: Command
    plan: Plan
    start_s: list[float] = field(default_factory=list)
    blocks_ms: list[list[float]] = field(default_factory=list)  # one list a set of processes
    records: list[TrialRecord] = field(default_factory=list)
    failure: str = ""


def contest(sides: Sequence[SideOfContest], job: JobFolder, facts: Facts, sets: int, rounds: int, until_s: float,
            heard: Callable[[int], None] = lambda at: None) -> int:
    """Sets of fresh processes, one a side, that take turns block by block; the order is turned round each round and each set.

    A side that does not come through is named in its ``failure`` and left out from then on. No set is begun that, by the length
    of the last one, would end after ``until_s``. Returns the number of whole sets.
    """
    done, longest = 0, 0.0
    while done < sets and (done == 0 or seconds() + longest < until_s):
        start, able = seconds(), [side for side in sides if not side.failure]
        if not able:
            break
        if not _one_set(able, done, job, facts, rounds):
            continue
        longest = seconds() - start
        done += 1
        heard(done)
    return done


def _one_set(sides: Sequence[SideOfContest], at: int, job: JobFolder, facts: Facts, rounds: int) -> bool:
    """One fresh process a side, ``rounds`` blocks each. False where a side fell out: the set does not count."""
    order = list(sides) if at % 2 == 0 else list(reversed(sides))
    running: dict[str, tuple[Arena, Trial, float]] = {}
    blocks: dict[str, list[float]] = {side.name: [] for side in order}
    side = None
    try:
        for side in order:
            arena = Arena(side.command, job, facts)
            running[side.name] = arena, (entrant := enter(arena, side.plan, at)).trial, entrant.start_s
        for turn in range(rounds):
            furthest = max(trial.ticks_done for _, trial, _ in running.values())
            for side in order if turn % 2 == 0 else reversed(order):
                arena, trial, _ = running[side.name]
                blocks[side.name].append(arena.block(trial, furthest))
        for side in order:
            _, trial, start_s = running[side.name]
            side.records.append(trial.finish())
            side.start_s.append(start_s)
            side.blocks_ms.append(blocks[side.name])
        return True
    except ProgramGone as gone:
        assert side is not None
        side.failure = last_line(gone.record)
        return False
    finally:
        for arena, _, _ in running.values():
            arena.close()


def ratio_of(a: SideOfContest, b: SideOfContest) -> Ratio | None:
    """How many times faster ``b`` is than ``a``, over the sets that both came through."""
    pairs = [[Round(x, y) for x, y in zip(one, other, strict=True)] for one, other in zip(a.blocks_ms, b.blocks_ms, strict=False)]
    return compare(pairs) if any(pairs) else None


def spell(ratio: Ratio | Mapping[str, Any] | None) -> str:
    """``1.31x [1.28, 1.39]``, or a dash."""
    if ratio is None:
        return "-"
    x = ratio if isinstance(ratio, Mapping) else ratio.to_json()
    return f"{x['median']:.2f}x [{x['low']:.2f}, {x['high']:.2f}]"


def last_line(record: TrialRecord) -> str:
    lines = [line.strip() for line in (record.reason or record.log_tail).strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else record.status
