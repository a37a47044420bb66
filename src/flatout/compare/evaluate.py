"""Turns measured pairs into changes with intervals, a verdict on the losses, and gates.

The step time of each pair gives one value: the logarithm of the ratio of the mean step times. Two processes
of one program differ for their whole life, so the interval is that of the mean over pairs (Student's t).
Measuring stops once the interval is narrow, or with a gate once that is decided. Looking after each pair makes
an interval of 95 % cover less, so `LEVEL` is a little higher. In simulations with normal pairs, 94 to 97 % of
the intervals cover the truth, and at most 3 % of the gates fail for a change just below the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flatout.compare.pairs import Pair, Run
from flatout.compare.sides import Side
from flatout.guard.loss_curves import curves_within_spread, finite_losses
from flatout.guard.verdict import repeats_itself
from flatout.measure.statistics import Estimate, difference, estimate, median
from flatout.schema.compare import Change, CompareRecord, Gate, LossVerdict, SideRecord
from flatout.schema.records import PHASES, PhaseTime, TrialRecord
from flatout.schema.sizes import size

LEVEL = 0.965
FEWEST_PAIRS = 6  # fewer do not show their spread
NARROW = 0.01  # half of the interval's width, without a gate
PHASE_FIELDS = ("median_ms", "low_ms", "high_ms", "share")
MOST_WAIT_S = 24 * 3600.0
MEMORY = "peak memory"


def enough(gate: float | None) -> Callable[[Sequence[Pair]], bool]:
    """Return whether pairs suffice: the interval lies on one side of the gate (0.03 for 3 %), or is narrow."""

    def suffice(pairs: Sequence[Pair]) -> bool:
        seen = estimate([pair.log_change for pair in pairs], LEVEL)
        if gate is None:
            return seen.half_width <= NARROW
        return seen.low > math.log1p(gate) or seen.high <= math.log1p(gate)

    return suffice


def fill(
    record: CompareRecord, sides: Sequence[Side], a: Sequence[Run], b: Sequence[Run], paired: bool = True
) -> None:
    """Write the figures of both sides and their changes into the record.

    ``paired``: ``a[i]`` and ``b[i]`` ran interleaved. Otherwise the runs of A are older, and the interval is
    that of two independent groups.
    """
    record.a, record.b = side_record(sides[0], a), side_record(sides[1], b)
    record.device = record.b.device

    def apart(x: Sequence[float | None], y: Sequence[float | None]) -> Estimate | None:
        if paired:
            both = [
                (one, other) for one, other in zip(x, y, strict=True) if one is not None and other is not None
            ]
            return estimate([other - one for one, other in both], LEVEL) if both else None
        known = [[v for v in side if v is not None] for side in (x, y)]
        return difference(known[0], known[1], LEVEL) if min(map(len, known)) > 1 else None

    def change(of: Callable[[Run], float | None]) -> Change | None:
        seen = apart([_log(of(run)) for run in a], [_log(of(run)) for run in b])
        return Change.of_logs(seen.mean, seen.half_width, seen.n) if seen is not None else None

    record.pairs = [math.expm1(y.log_ms - x.log_ms) for x, y in zip(a, b, strict=True)] if paired else []
    record.step_time = change(lambda run: math.exp(run.log_ms))
    record.start = change(lambda run: run.start_s)
    record.memory = change(lambda run: run.record.peak_memory_bytes)
    for name in PHASES:
        seen = apart([_phase_ms(run, name) for run in a], [_phase_ms(run, name) for run in b])
        if seen is not None and math.isfinite(seen.half_width):
            record.phases_ms[name] = [seen.mean, seen.low, seen.high]


def _log(value: float | None) -> float | None:
    return math.log(value) if value else None


def _phase_ms(run: Run, name: str) -> float | None:
    phase = run.record.phases.get(name)
    return phase["median_ms"] if phase else None


def side_record(side: Side, runs: Sequence[Run]) -> SideRecord:
    records = [run.record for run in runs]
    samples = [r.samples_per_step for r in records if r.samples_per_step]
    step_ms = median([math.exp(run.log_ms) for run in runs])
    return SideRecord(
        side.label,
        list(side.command.shown),
        side.revision,
        side.plan.to_json(),
        records[0].versions,
        records[0].device,
        records[0].unit,
        len(runs),
        sum(r.steps for r in records),
        step_ms,
        median(samples) / step_ms * 1000 if samples else None,
        median([run.start_s for run in runs]),
        max((r.peak_memory_bytes or 0 for r in records), default=0) or None,
        _phases(records),
        {str(r.seed): [float.fromhex(x) for x in r.losses] for r in records},
    )


def _phases(records: Sequence[TrialRecord]) -> dict[str, PhaseTime]:
    return {
        name: PhaseTime(
            *(median([r.phases[name][key] for r in records if name in r.phases]) for key in PHASE_FIELDS)
        )
        for name in records[0].phases
    }


def compare_losses(
    a: Sequence[TrialRecord], b: Sequence[TrialRecord], again: TrialRecord | None
) -> LossVerdict:
    """Compare losses of runs with the same seeds: bit by bit, else with the spread of A's seeds.

    ``again``: a second run of A with its first seed, which shows whether A repeats itself.
    """
    common = [min(len(x.losses), len(y.losses)) for x, y in zip(a, b, strict=True)]
    if not common or min(common) < 2:
        return LossVerdict(why="the programs computed fewer than two losses")
    total, seeds = sum(common), len(common)
    unlike = [
        next((at for at in range(n) if x.losses[at] != y.losses[at]), None)
        for x, y, n in zip(a, b, common, strict=True)
    ]
    first = min((at for at in unlike if at is not None), default=None)
    if first is None:
        return LossVerdict("same bits", f"all {total} losses are bitwise equal ({seeds} seeds)")
    x, y = next((x, y) for x, y, at in zip(a, b, unlike, strict=True) if at == first)
    one, other = float.fromhex(x.losses[first]), float.fromhex(y.losses[first])
    apart = abs(other - one) / abs(one) if one and math.isfinite(one) and math.isfinite(other) else math.inf
    what = f"loss {first + 1} of seed {x.seed} is {other:.9g} instead of {one:.9g} (relative difference {apart:.2g})"
    batches = next(
        (at for at, (p, q) in enumerate(zip(x.batch_hashes, y.batch_hashes, strict=False)) if p != q), None
    )
    cause = f"; batch {batches + 1} differs already" if batches is not None and batches <= first else ""
    if again is not None and not repeats_itself(a[0], again):
        cause += "; A does not repeat itself either: a second run with its seed has other losses"
    curves = [
        ([float.fromhex(v) for v in p.losses[:n]], [float.fromhex(v) for v in q.losses[:n]])
        for p, q, n in zip(a, b, common, strict=True)
    ]
    checks = [finite_losses(curves), curves_within_spread(curves)]
    failed = [check.why for check in checks if not check.passed]
    if failed:
        return LossVerdict("different", f"{'; '.join(failed)}; {what}{cause}", first)
    return LossVerdict("within the spread", f"{checks[-1].why}; {what}{cause}", first)


def gates(
    record: CompareRecord, time: float | None, memory: float | int | None, losses: str | None, pair_s: float
) -> list[Gate]:
    """Judge the limits: shares of step time and memory, and ``bits`` or ``spread`` for losses.

    ``memory`` may also be an amount, in bytes as an integer."""
    found = []
    if time is not None:
        found.append(_limit("step time", record.step_time, time, pair_s))
    if isinstance(memory, int):
        found.append(_memory_amount(record, memory))
    elif memory is not None:
        found.append(_limit(MEMORY, record.memory, memory, pair_s))
    if losses is not None:
        allowed = {"bits": ("same bits",), "spread": ("same bits", "within the spread")}[losses]
        verdict = record.losses.verdict
        told = "passed" if verdict in allowed else "cannot tell" if verdict == "not compared" else "failed"
        found.append(Gate("losses", losses, told, record.losses.why))
    return found


def _memory_amount(record: CompareRecord, limit_bytes: int) -> Gate:
    """Judge whether every process of B stayed within the limit. Its largest peak needs no interval."""
    limit = size(limit_bytes)
    peak = record.b.peak_memory_bytes if record.b is not None else None
    if peak is None:
        return Gate(MEMORY, limit, "cannot tell", "no peak memory was measured")
    needed = f"the peak memory of B is {size(peak)}"
    if peak > limit_bytes:
        return Gate(MEMORY, limit, "failed", f"{needed}: above the limit of {limit}")
    return Gate(MEMORY, limit, "passed", f"{needed}: within the limit of {limit}")


def _limit(name: str, seen: Change | None, limit: float, pair_s: float) -> Gate:
    text = f"{limit:.3g}" if limit < 0.001 else f"{100 * limit:.3g} %"
    if seen is None:
        return Gate(name, text, "cannot tell", f"no {name} was measured")
    inside = f"the {name} changes by {100 * seen.low:+.1f} % to {100 * seen.high:+.1f} %"
    if seen.low > limit:
        return Gate(name, text, "failed", f"{inside}: above the limit of +{text}")
    if seen.high <= limit:
        return Gate(name, text, "passed", f"{inside}: within the limit of +{text}")
    more = (
        f"; about {_needed(seen, limit, pair_s)} would decide it: give a longer --budget"
        if name == "step time"
        else ""
    )
    return Gate(name, text, "cannot tell", f"{inside}, on both sides of the limit of +{text}{more}")


def _needed(seen: Change, limit: float, pair_s: float) -> str:
    """The time after which the interval would be as narrow as the distance to the limit."""
    half = (math.log1p(seen.high) - math.log1p(seen.low)) / 2
    apart = max(abs(math.log1p(seen.value) - math.log1p(limit)), math.log1p(limit) / 10)
    wait_s = seen.n * (half / apart) ** 2 * 1.2 * pair_s if math.isfinite(half) else math.inf
    return f"{max(1, math.ceil(wait_s / 60))} minutes" if wait_s < MOST_WAIT_S else "more than a day"
