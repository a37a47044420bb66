"""Runs interleaved fresh processes with flatout's own interleaver, for benchmarks that measure a claim again.

The benchmarks use nothing that the tuner says of itself: they start fresh programs, and share only the
instrument (the baton, the clock, the statistics).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance import RESULTS  # noqa: F401  puts src on the path

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round, block_ms, compare
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.schema.records import Ratio, TrialRecord
from flatout.trial.parent import ProgramGone
from flatout.tune.interleaver import Interleaver, RunningCandidate, ask_options

ROUNDS = 6
FIRST_SEED = 100  # not used by the tuner
TIMEOUT_S = 300.0
SETTLING_TICKS = 5


@contextmanager
def standing_in(folder: Path | str, environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Changes the folder and adds to the environment, then restores both. Programs inherit both."""
    folder_before, environment_before = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.update(environment or {})
    try:
        yield
    finally:
        os.chdir(folder_before)
        os.environ.clear()
        os.environ.update(environment_before)


def enter(interleaver: Interleaver, plan: Plan, seed: int, timeout_s: float = TIMEOUT_S) -> RunningCandidate:
    """Starts a program, waits for its steady state and measures its steps. Raises ProgramGone.

    A compiler may still be active when the program reports its steady state, so additional steps give the
    step time.
    """
    candidate = interleaver.start_paused(plan, seed, timeout_s)
    trial = candidate.trial
    try:
        interleaver.unit = trial.ready["unit"]
        interleaver.tick_ms = max(trial.ready["tick_ms"], 1e-3)
        if interleaver.tick_ms < 2000:
            interleaver.tick_ms = max(block_ms(trial.run_ticks(SETTLING_TICKS, seconds() + timeout_s)), 1e-3)
        workers = max(
            (loader["num_workers"] for loader in ask_options(trial)["context"]["loaders"]), default=0
        )
        trial.pause()
        interleaver.prefetched_ticks = 3 * workers
    except BaseException:
        interleaver.dismiss(trial)
        raise
    return candidate


@dataclass
class ComparisonSide:
    """One program of a comparison: its command, its plan, and its measurements."""

    name: str
    command: Command
    plan: Plan
    start_s: list[float] = field(default_factory=list)
    blocks_ms: list[list[float]] = field(default_factory=list)  # one list for each set of processes
    records: list[TrialRecord] = field(default_factory=list)
    failure: str = ""


def comparison(
    sides: Sequence[ComparisonSide],
    job: JobFolder,
    facts: Facts,
    sets: int,
    rounds: int,
    until_s: float,
    observed: Callable[[int], None] = lambda at: None,
    first_seed: int = 0,
    set_s: float = math.inf,
) -> int:
    """Runs sets of fresh processes, one a side, interleaved block by block; returns how many are complete.

    The order reverses each round and each set. A side that fails is named in its ``failure`` and left out
    from then on; if only one of several sides remains, it is not measured. All sides of a set share one seed;
    the next set uses the next seed. No set starts that would end after ``until_s``, judged by the length of
    the last one. A set runs for ``set_s`` seconds, and for at least one round.
    """
    done, longest = 0, 0.0
    while done < sets and (done == 0 or seconds() + longest < until_s):
        start, able = seconds(), [side for side in sides if not side.failure]
        if len(able) < min(2, len(sides)):
            break
        if not _one_set(able, done, first_seed + done, job, facts, rounds, set_s):
            continue
        longest = seconds() - start
        done += 1
        observed(done)
    return done


Running = dict[str, tuple[Interleaver, RunningCandidate]]


def _one_set(
    sides: Sequence[ComparisonSide],
    at: int,
    seed: int,
    job: JobFolder,
    facts: Facts,
    rounds: int,
    set_s: float,
) -> bool:
    """Runs one fresh process a side, ``rounds`` blocks each. Returns False if a side failed."""
    order = list(sides) if at % 2 == 0 else list(reversed(sides))
    running: Running = {}
    try:
        for side in order:
            with _blamed(side):
                _enter_side(side, seed, job, facts, running)
        blocks = _turns(order, running, rounds, set_s)
        records = {}
        for side in order:
            with _blamed(side):
                records[side.name] = running[side.name][1].trial.finish()
    except ProgramGone:
        return False
    finally:
        for interleaver, _ in running.values():
            interleaver.close()
    for side in order:  # a set counts for every side or for none
        side.records.append(records[side.name])
        side.start_s.append(running[side.name][1].startup_s)
        side.blocks_ms.append(blocks[side.name])
    return True


def _enter_side(side: ComparisonSide, seed: int, job: JobFolder, facts: Facts, running: Running) -> None:
    """Starts a side. Sides of one command share an interleaver and use blocks of equal step counts.

    The mean length of their steps determines the count.
    """
    shared = [interleaver for interleaver, _ in running.values() if interleaver.command == side.command]
    interleaver = shared[0] if shared else Interleaver(side.command, job, facts)
    tick_ms, prefetched = interleaver.tick_ms * len(shared), interleaver.prefetched_ticks if shared else 0
    try:
        candidate = enter(interleaver, side.plan, seed)
    except BaseException:
        if not shared:
            interleaver.close()
        raise
    interleaver.tick_ms, interleaver.prefetched_ticks = (
        (tick_ms + interleaver.tick_ms) / (len(shared) + 1),
        max(prefetched, interleaver.prefetched_ticks),
    )
    running[side.name] = interleaver, candidate


def _turns(
    order: Sequence[ComparisonSide], running: Running, rounds: int, set_s: float
) -> dict[str, list[float]]:
    """Returns the milliseconds a step of each side's blocks, equally many for each.

    The clock or the end of a program may end it early, but never before one round.
    """
    blocks: dict[str, list[float]] = {side.name: [] for side in order}
    until_s = seconds() + set_s
    for turn in range(rounds):
        furthest = max(candidate.trial.ticks_done for _, candidate in running.values())
        times = {}
        for side in order if turn % 2 == 0 else reversed(order):
            interleaver, candidate = running[side.name]
            try:
                with _blamed(side, turn > 0):
                    times[side.name] = interleaver.block(candidate.trial, furthest)
            except ProgramGone as gone:
                if turn and gone.record.status == "ended":
                    return blocks
                raise
        for name, ms in times.items():
            blocks[name].append(ms)
        if seconds() >= until_s:
            break
    return blocks


@contextmanager
def _blamed(side: ComparisonSide, may_end: bool = False) -> Iterator[None]:
    """Records a program that ends here as its side's ``failure``; with ``may_end``, a normal end is none."""
    try:
        yield
    except ProgramGone as gone:
        if not (may_end and gone.record.status == "ended"):
            side.failure = last_line(gone.record)
        raise


def rounds_of(a: ComparisonSide, b: ComparisonSide) -> list[list[Round]]:
    return [
        [Round(x, y) for x, y in zip(one, other, strict=True)]
        for one, other in zip(a.blocks_ms, b.blocks_ms, strict=False)
    ]


def ratio_of(a: ComparisonSide, b: ComparisonSide) -> Ratio | None:
    """Returns the speed-up of ``b`` over ``a``, over the sets that both completed."""
    pairs = rounds_of(a, b)
    return compare(pairs) if any(pairs) else None


@dataclass
class Pairs:
    """Two sides of a comparison and its result. ``ratio`` is A's time over B's."""

    a: ComparisonSide
    b: ComparisonSide

    @property
    def rounds(self) -> list[list[Round]]:
        return rounds_of(self.a, self.b)

    @property
    def records(self) -> list[tuple[TrialRecord, TrialRecord]]:
        return list(zip(self.a.records, self.b.records, strict=True))

    @property
    def failure(self) -> str:
        return self.a.failure or self.b.failure

    @property
    def ratio(self) -> Ratio | None:
        return ratio_of(self.a, self.b)

    def to_json(self) -> dict[str, Any]:
        ratio = self.ratio
        return {
            "ratio": ratio.to_json() if ratio else None,
            "failure": self.failure,
            "rounds_ms": [[(r.a_ms, r.b_ms) for r in pair] for pair in self.rounds],
        }


def fresh_pairs(
    command: Command,
    a: Plan,
    b: Plan,
    job: JobFolder,
    facts: Facts,
    pairs: int = 3,
    rounds: int = ROUNDS,
    first_seed: int = FIRST_SEED,
    pair_s: float = 120.0,
    observed: Callable[[int, Pairs], None] = lambda at, found: None,
) -> Pairs:
    """Runs fresh pairs, ``a`` against ``b``, until one fails. The tuner does not use these seeds.

    The side that starts first alternates from pair to pair.
    """
    found = Pairs(ComparisonSide("a", command, a), ComparisonSide("b", command, b))
    comparison(
        (found.a, found.b),
        job,
        facts,
        pairs,
        rounds,
        math.inf,
        lambda done: observed(done - 1, found),
        first_seed,
        pair_s,
    )
    return found


def spell(ratio: Ratio | Mapping[str, Any] | None) -> str:
    """Returns ``1.31x [1.28, 1.39]``, or a dash."""
    if ratio is None:
        return "-"
    x = ratio if isinstance(ratio, Mapping) else ratio.to_json()
    return f"{x['median']:.2f}x [{x['low']:.2f}, {x['high']:.2f}]"


def last_line(record: TrialRecord) -> str:
    lines = [line.strip() for line in (record.reason or record.log_tail).strip().splitlines() if line.strip()]
    return lines[-1][:300] if lines else record.status
