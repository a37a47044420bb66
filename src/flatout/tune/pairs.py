"""Measures pairs of fresh processes, plain and tuned, that confirm a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.guard.loss_curves import nonfinite_loss
from flatout.measure.clock import seconds
from flatout.schema.enums import Effect
from flatout.schema.errors import error_line
from flatout.schema.plan import Plan
from flatout.schema.records import Ratio, TrialRecord
from flatout.tune.blame import ended_like_plain
from flatout.tune.candidates import Candidate, plan_of, widest_effect
from flatout.tune.comparison import ProgramRequest, ProgramResult, measure_together
from flatout.tune.effects import PLAN, TimedBlock, plan_speed, ratio_of
from flatout.tune.limits import EXACT_TICKS, USUAL_PAIRS
from flatout.tune.remote import TIMEOUT_S, RemoteResult
from flatout.tune.tuning import Tuning

MAX_LATE_REPLICA_S = 20.0  # upper limit for replaying a late step


@dataclass
class Pairs:
    """The fresh runs of a search: the plain runs by seed, and the runs of one plan."""

    plain: dict[int, TrialRecord] = field(default_factory=dict)
    tuned: dict[int, TrialRecord] = field(default_factory=dict)
    repeats: dict[int | None, TrialRecord] = field(default_factory=dict)  # second plain runs
    plain_ms: list[float] = field(default_factory=list)
    tuned_ms: list[float] = field(default_factory=list)
    blocks: list[TimedBlock] = field(default_factory=list)  # of the plan with `PLAN` on
    late_replica: dict[str, Any] | None = None  # the replica of a step after the longest training
    hosts: list[str] = field(default_factory=list)
    longest_s: float = 0.0  # that a pair took
    failure: str = ""  # why the plan's program was lost

    def common_runs(self) -> tuple[list[TrialRecord], list[TrialRecord]]:
        seeds = sorted(self.plain.keys() & self.tuned.keys())
        return [self.plain[seed] for seed in seeds], [self.tuned[seed] for seed in seeds]

    def add(self, tuning: Tuning, seed: int, record: TrialRecord, plain: bool) -> None:
        """Add the run of one side."""
        (self.plain if plain else self.tuned)[seed] = record
        if plain:
            tuning.session.nan_loss = tuning.session.nan_loss or nonfinite_loss(record)

    def without_plan(self) -> Pairs:
        """The plain runs alone, for another plan."""
        blocks = [block for block in self.blocks if not block.active]
        return Pairs(plain=self.plain, plain_ms=self.plain_ms, repeats=self.repeats, blocks=blocks)

    def speed(self, tuning: Tuning) -> Ratio:
        """How many times as fast the plan is in these pairs; ``n`` counts their processes."""
        processes = {block.process for block in self.blocks}
        return ratio_of(plan_speed(tuning.counted(self.blocks)), len(processes))


def keys_of(candidates: Sequence[Candidate]) -> frozenset[str]:
    return frozenset(c.choice.text for c in candidates)


def measure_pairs(tuning: Tuning, tuned: Sequence[Candidate], pairs: Pairs) -> None:
    """Run the next pair; on remote machines, one pair per node. A plain run of a known seed is reused."""
    plan, remote, first_seed = plan_of(tuned), tuning.remote, len(pairs.tuned)
    nodes = len(remote.nodes) if remote is not None else 0
    pair_count = max(
        1, min(nodes, USUAL_PAIRS - first_seed if first_seed < USUAL_PAIRS else 2 * USUAL_PAIRS - first_seed)
    )
    seeds = range(first_seed, first_seed + pair_count)
    requests = [_pair_requests(tuning, tuned, plan, seed, seed not in pairs.plain) for seed in seeds]
    start_s = seconds()
    for seed, (sides, (result, host)) in zip(
        seeds, zip(requests, _measure_requests(tuning, requests), strict=True), strict=True
    ):
        pairs.hosts += [host] if host else []
        _record_pair(tuning, pairs, tuned, seed, sides, result, host)
    pairs.longest_s = max(pairs.longest_s, seconds() - start_s)


def _pair_requests(
    tuning: Tuning, tuned: Sequence[Candidate], plan: Plan, seed: int, with_plain: bool
) -> list[ProgramRequest]:
    """Return both sides of a pair.

    Their order alternates from pair to pair, because the machine may speed up or slow down.
    """
    rows = (None,) * tuning.rounds
    record = "with samples" if widest_effect(tuned) is Effect.RESAMPLED else "record"
    replays_late = seed == USUAL_PAIRS - 1 and tuning.replica_s <= MAX_LATE_REPLICA_S
    late_replica = (
        tuple(c.choice for c in tuned if c.effect is not Effect.EXACT and c.lever.live)
        if replays_late
        else ()
    )
    # An end that was seen before comes no sooner
    min_ticks = tuning.min_ticks or (
        min(EXACT_TICKS, tuning.length_ticks or EXACT_TICKS) if widest_effect(tuned) is Effect.EXACT else 0
    )
    sides = [
        ProgramRequest(Plan(), rows, seed, record, late_replica, min_ticks),
        ProgramRequest(plan, rows, seed, record, min_ticks=min_ticks),
    ]
    sides = sides if with_plain else sides[1:]
    return sides if seed % 2 == 0 else sides[::-1]


def _measure_requests(
    tuning: Tuning, requests: Sequence[list[ProgramRequest]]
) -> list[tuple[list[ProgramResult], str]]:
    remote, pair_s = tuning.remote, tuning.pair_s
    # Its blocks end with the budget, but not before each program had some
    until_s = seconds() + min(3 * pair_s, max(pair_s, tuning.remaining_s(overrun=True)))
    replies: dict[int, RemoteResult] = {}
    if remote is not None and remote.nodes:
        orders = [tuning.remote_order(sides, 3 * pair_s) for sides in requests]
        for reply in remote.run_orders(orders, TIMEOUT_S + 3 * pair_s + tuning.timeout_s):
            replies |= {reply.number: reply} if reply.results else {}

    def measure_here(sides: list[ProgramRequest]) -> list[ProgramResult]:
        groups = [sides] if tuning.max_copies >= 2 else [[request] for request in sides]
        results: list[ProgramResult] = []
        for group in groups:
            results += measure_together(tuning.interleaver, group, until_s, tuning.timeout_s)
        return results

    return [
        (replies[i].results, replies[i].host) if i in replies else (measure_here(sides), "")
        for i, sides in enumerate(requests)
    ]


def _record_pair(
    tuning: Tuning,
    pairs: Pairs,
    tuned: Sequence[Candidate],
    seed: int,
    requests: Sequence[ProgramRequest],
    results: Sequence[ProgramResult],
    host: str,
) -> None:
    for request, result in zip(requests, results, strict=True):
        plain = not len(request.plan)
        record = result.record or (
            result.end_record
            if result.end_record is not None and result.end_record.status == "ended" and result.blocks
            else None
        )
        if record is None:
            if result.end_record is not None:
                ended_like_plain(
                    tuning, result.end_record, result.ticks
                )  # raises if the program fails by itself
            why = (
                f"{result.failed_lever[0]}: {result.failed_lever[1]}"
                if result.failed_lever
                else error_line(result.end_record.reason)
                if result.end_record
                else "it was lost"
            )
            pairs.failure = f"the plain program: {why}" if plain else why
            return
        if result.late_replica is not None:
            pairs.late_replica = result.late_replica
        pairs.add(tuning, seed, record, plain)
        (pairs.plain_ms if plain else pairs.tuned_ms).extend(block.ms for block in result.blocks)
        tuning.processes += 1
        active = frozenset[str]() if plain else keys_of(tuned)
        rows = [active] * len(request.rows)
        blocks = tuning.add_blocks(tuning.processes, rows, result, seed + 1, host)
        pairs.blocks += blocks if plain else [replace(b, active=frozenset({PLAN})) for b in blocks]
        tuning.start_cost_s = max(
            tuning.start_cost_s,
            tuning.single_start_s(result.startup_s, len(requests)) / (1.5 if len(requests) > 1 else 1.0),
        )
