"""Measures pairs of fresh processes, plain and tuned, that confirm a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.guard.loss_curves import nan_loss
from flatout.measure.clock import seconds
from flatout.measure.statistics import Round
from flatout.schema.enums import Effect
from flatout.schema.errors import last_line
from flatout.schema.plan import Plan, spell
from flatout.schema.records import TrialRecord
from flatout.tune.blame import came_to_its_end
from flatout.tune.candidates import Candidate, plan_of, widest
from flatout.tune.comparison import ProgramRequest, ProgramResult, measure_together
from flatout.tune.limits import PAIRS
from flatout.tune.remote import TIMEOUT_S
from flatout.tune.tuning import Tuning

LATE_S = 20.0  # upper limit for replaying a late step


@dataclass
class Pairs:
    """The fresh runs of a search: the plain runs by seed, and the runs of one plan."""

    plain: dict[int, TrialRecord] = field(default_factory=dict)
    tuned: dict[int, TrialRecord] = field(default_factory=dict)
    plain_ms: list[float] = field(default_factory=list)
    tuned_ms: list[float] = field(default_factory=list)
    rounds: list[list[Round]] = field(default_factory=list)
    late: dict[str, Any] | None = None  # the replica of a step after the longest training
    hosts: list[str] = field(default_factory=list)
    longest_s: float = 0.0  # that a pair took
    failure: str = ""  # why the plan's program was lost

    def both(self) -> tuple[list[TrialRecord], list[TrialRecord]]:
        seeds = sorted(self.plain.keys() & self.tuned.keys())
        return [self.plain[seed] for seed in seeds], [self.tuned[seed] for seed in seeds]


def keys_of(candidates: Sequence[Candidate]) -> frozenset[str]:
    return frozenset(spell(c.choice.name, c.choice.value) for c in candidates)


def more_pairs(tuning: Tuning, tuned: Sequence[Candidate], pairs: Pairs) -> None:
    """Run the next pair; on remote machines, one pair per node. A plain run of a known seed is reused."""
    plan, elsewhere, first = plan_of(tuned), tuning.elsewhere, len(pairs.tuned)
    nodes = len(elsewhere.ready) if elsewhere is not None else 0
    wanted = max(1, min(nodes, PAIRS - first if first < PAIRS else 2 * PAIRS - first))
    seeds = range(first, first + wanted)
    asked = [_asked(tuning, tuned, plan, seed, seed not in pairs.plain) for seed in seeds]
    start_s = seconds()
    for seed, (programs, (seen, host)) in zip(
        seeds, zip(asked, _measured(tuning, asked), strict=True), strict=True
    ):
        pairs.hosts += [host] if host else []
        _keep(tuning, pairs, tuned, seed, programs, seen)
    pairs.longest_s = max(pairs.longest_s, seconds() - start_s)


def _asked(
    tuning: Tuning, tuned: Sequence[Candidate], plan: Plan, seed: int, with_plain: bool
) -> list[ProgramRequest]:
    """Return both sides of a pair.

    Their order alternates from pair to pair, because the machine may speed up or slow down.
    """
    rows = (None,) * tuning.rounds
    record = "draws" if widest(tuned) is Effect.RESAMPLED else "record"
    checks_late = seed == PAIRS - 1 and tuning.interleaver.unit == "step" and tuning.replica_s <= LATE_S
    late = (
        tuple(c.choice for c in tuned if c.effect is not Effect.EXACT and c.lever.live) if checks_late else ()
    )
    sides = [ProgramRequest(Plan(), rows, seed, record, late), ProgramRequest(plan, rows, seed, record)]
    sides = sides if with_plain else sides[1:]
    return sides if seed % 2 == 0 else sides[::-1]


def _measured(tuning: Tuning, asked: Sequence[list[ProgramRequest]]) -> list[tuple[list[ProgramResult], str]]:
    elsewhere, pair_s = tuning.elsewhere, tuning.pair_s
    # Its blocks end with the budget, but not before each program had some
    until_s = seconds() + min(3 * pair_s, max(pair_s, tuning.allowed_s(overrun=True)))
    found: dict[int, tuple[list[ProgramResult], str]] = {}
    if elsewhere is not None and elsewhere.ready:
        orders = [tuning.order(programs, 3 * pair_s) for programs in asked]
        for held in elsewhere.held(orders, TIMEOUT_S + 3 * pair_s + tuning.timeout_s):
            if held.answer is not None:
                seen = [ProgramResult.from_json(each) for each in held.answer["seen"]]
                found[held.number] = seen, held.host

    def here(programs: list[ProgramRequest]) -> list[ProgramResult]:
        together = [programs] if tuning.copies >= 2 else [[one] for one in programs]
        return [
            seen
            for some in together
            for seen in measure_together(tuning.interleaver, some, until_s, tuning.timeout_s)
        ]

    return [found[at] if at in found else (here(programs), "") for at, programs in enumerate(asked)]


def _keep(
    tuning: Tuning,
    pairs: Pairs,
    tuned: Sequence[Candidate],
    seed: int,
    asked: Sequence[ProgramRequest],
    found: Sequence[ProgramResult],
) -> None:
    """Record the results of one pair."""
    times: dict[bool, list[float]] = {}
    for one, seen in zip(asked, found, strict=True):
        plain = not len(one.plan)
        record = seen.record or (
            seen.gone if seen.gone is not None and seen.gone.status == "ended" and seen.blocks else None
        )
        if record is None:
            if seen.gone is not None:
                came_to_its_end(tuning, seen.gone, seen.ticks)  # raises if the program fails by itself
            said = (
                f"{seen.left_out[0]}: {seen.left_out[1]}"
                if seen.left_out
                else last_line(seen.gone.reason)
                if seen.gone
                else "it was lost"
            )
            pairs.failure = f"the plain program: {said}" if plain else said
            return
        if seen.late is not None:
            pairs.late = seen.late
        times[plain] = [block.ms for block in seen.blocks]
        (pairs.plain if plain else pairs.tuned)[seed] = record
        if plain:
            tuning.session.nan_loss = tuning.session.nan_loss or nan_loss(record)
        (pairs.plain_ms if plain else pairs.tuned_ms).extend(times[plain])
        on = frozenset[str]() if plain else keys_of(tuned)
        if on <= tuning.choices.keys():
            tuning.processes += 1
            tuning.keep_blocks(tuning.processes, [on] * len(one.rows), seen, seed + 1)
        tuning.start_cost_s = max(
            tuning.start_cost_s, tuning.start_of(seen.start_s, len(asked)) / (1.5 if len(asked) > 1 else 1.0)
        )
    if len(times) == 2:
        pairs.rounds.append([Round(a, b) for a, b in zip(times[True], times[False], strict=False)])
