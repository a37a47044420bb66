"""Turns measured pairs into changes with intervals, a verdict on the losses, and gates.

The step time of each pair gives one value: the logarithm of the ratio of the mean step times. Two processes
of one program differ for their whole life, so the interval is that of the mean over pairs (Student's t).
Measuring stops once the interval is narrow, or with a gate once that is decided. Looking after each pair makes
an interval of 95 % cover less, so `LEVEL` is a little higher. In simulations with normal pairs, 94 to 97 % of
the intervals cover the truth, and at most 3 % of the gates fail for a change just below the limit.
"""

import math
from collections.abc import Callable, Sequence

from flatout.compare.pairs import Pair, PairTimer, Run
from flatout.compare.sides import Side
from flatout.guard.loss_curves import common_losses, curves_within_spread, finite_losses
from flatout.guard.verdict import judge, perturbation_for, repeats_itself
from flatout.measure.statistics import Estimate, difference, estimate, median
from flatout.schema.compare import Change, CompareRecord, Gate, LossVerdict, SideRecord, TrainingVerdict
from flatout.schema.enums import Effect
from flatout.schema.records import PHASES, PhaseTime, TrialRecord
from flatout.schema.sizes import size

LEVEL = 0.965
MIN_PAIRS = 6  # fewer do not show their spread
MAX_HALF_WIDTH = 0.01  # half of the interval's width, without a gate
PHASE_FIELDS = ("median_ms", "low_ms", "high_ms", "share")
MAX_WAIT_S = 24 * 3600.0
MEMORY = "peak memory"


def stop_rule(gate: float | None, blame: bool = False) -> Callable[[Sequence[Pair]], bool]:
    """Return whether pairs suffice: the interval lies on one side of the gate (0.03 for 3 %), or is narrow.

    ``blame``: also if it is narrow beside the change, whose parts are then known as well."""

    def is_enough(pairs: Sequence[Pair]) -> bool:
        interval = estimate([pair.log_change for pair in pairs], LEVEL)
        if gate is None:
            limit = abs(interval.mean) / 10 if blame else 0.0
            return interval.half_width <= max(MAX_HALF_WIDTH, limit)
        return interval.low > math.log1p(gate) or interval.high <= math.log1p(gate)

    return is_enough


def fill_record(
    record: CompareRecord, sides: Sequence[Side], a: Sequence[Run], b: Sequence[Run], paired: bool = True
) -> None:
    """Write the figures of both sides and their changes into the record.

    ``paired``: ``a[i]`` and ``b[i]`` ran interleaved. Otherwise the runs of A are older, and the interval is
    that of two independent groups."""
    record.a, record.b = side_record(sides[0], a), side_record(sides[1], b)
    record.device = record.b.device

    def log_change(x: Sequence[float | None], y: Sequence[float | None]) -> Estimate | None:
        if paired:
            pairs = [(old, new) for old, new in zip(x, y, strict=True) if old is not None and new is not None]
            return estimate([new - old for old, new in pairs], LEVEL) if pairs else None
        groups = [[v for v in side if v is not None] for side in (x, y)]
        return difference(groups[0], groups[1], LEVEL) if min(map(len, groups)) > 1 else None

    def change(value_of: Callable[[Run], float | None]) -> Change | None:
        interval = log_change([_log(value_of(run)) for run in a], [_log(value_of(run)) for run in b])
        return (
            Change.of_logs(interval.mean, interval.half_width, interval.n) if interval is not None else None
        )

    record.pairs = [math.expm1(y.log_ms - x.log_ms) for x, y in zip(a, b, strict=True)] if paired else []
    record.step_time = change(lambda run: math.exp(run.log_ms))
    record.start = change(lambda run: run.start_s)
    record.memory = change(lambda run: run.record.peak_memory_bytes)
    for name in PHASES:
        interval = log_change([_phase_ms(run, name) for run in a], [_phase_ms(run, name) for run in b])
        if interval is not None and math.isfinite(interval.half_width):
            record.phases_ms[name] = [interval.mean, interval.low, interval.high]


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
    a: Sequence[TrialRecord], b: Sequence[TrialRecord], repeat: TrialRecord | None
) -> LossVerdict:
    """Compare losses of runs with the same seeds: bit by bit, else with the spread of A's seeds.

    ``repeat``: a second run of A with its first seed, which shows whether A repeats itself."""
    common = [min(len(x.losses), len(y.losses)) for x, y in zip(a, b, strict=True)]
    if not common or min(common) < 2:
        return LossVerdict(why="the programs computed fewer than two losses")
    total, seeds = sum(common), len(common)
    first_unlike = [
        next((i for i in range(n) if x.losses[i] != y.losses[i]), None)
        for x, y, n in zip(a, b, common, strict=True)
    ]
    first = min((i for i in first_unlike if i is not None), default=None)
    if first is None:
        return LossVerdict("same bits", f"all {total} losses are bitwise equal ({seeds} seeds)")
    x, y = next((x, y) for x, y, i in zip(a, b, first_unlike, strict=True) if i == first)
    old, new = float.fromhex(x.losses[first]), float.fromhex(y.losses[first])
    error = abs(new - old) / abs(old) if old and math.isfinite(old) and math.isfinite(new) else math.inf
    difference = f"loss {first + 1} of seed {x.seed} is {new:.9g} instead of {old:.9g} (relative difference {error:.2g})"
    hashes = enumerate(zip(x.batch_hashes, y.batch_hashes, strict=False))
    batches = next((i for i, (p, q) in hashes if p != q), None)
    cause = f"; batch {batches + 1} differs already" if batches is not None and batches <= first else ""
    if repeat is not None and not repeats_itself(a[0], repeat):
        cause += "; A does not repeat itself either: a second run with its seed has other losses"
    curves = list(map(common_losses, a, b))
    checks = [finite_losses(curves), curves_within_spread(curves)]
    failed = [check.why for check in checks if check.passed is not True]
    if failed:
        return LossVerdict("different", f"{'; '.join(failed)}; {difference}{cause}", first)
    return LossVerdict("within the spread", f"{checks[-1].why}; {difference}{cause}", first)


def gates(
    record: CompareRecord, time: float | None, memory: float | int | None, losses: str | None, pair_s: float
) -> list[Gate]:
    """Judge the limits: shares of step time and memory, and ``bits`` or ``spread`` for losses.

    ``memory`` may also be an amount, in bytes as an integer."""
    results = []
    if time is not None:
        results.append(_judge_limit("step time", record.step_time, time, pair_s))
    if isinstance(memory, int):
        results.append(_memory_amount(record, memory))
    elif memory is not None:
        results.append(_judge_limit(MEMORY, record.memory, memory, pair_s))
    if losses is not None:
        allowed = {"bits": ("same bits",), "spread": ("same bits", "within the spread")}[losses]
        verdict = record.losses.verdict
        outcome = "passed" if verdict in allowed else "cannot tell" if verdict == "not compared" else "failed"
        results.append(Gate("losses", losses, outcome, record.losses.why))
    return results


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


def _judge_limit(name: str, change: Change | None, limit: float, pair_s: float) -> Gate:
    text = f"{limit:.3g}" if limit < 0.001 else f"{100 * limit:.3g} %"
    if change is None:
        return Gate(name, text, "cannot tell", f"no {name} was measured")
    interval = f"the {name} changes by {100 * change.low:+.1f} % to {100 * change.high:+.1f} %"
    if change.low > limit:
        return Gate(name, text, "failed", f"{interval}: above the limit of +{text}")
    if change.high <= limit:
        return Gate(name, text, "passed", f"{interval}: within the limit of +{text}")
    hint = (
        f"; about {_deciding_time(change, limit, pair_s)} would decide it: give a longer --budget"
        if name == "step time"
        else ""
    )
    return Gate(name, text, "cannot tell", f"{interval}, on both sides of the limit of +{text}{hint}")


def _deciding_time(change: Change, limit: float, pair_s: float) -> str:
    """The time after which the interval would be as narrow as the distance to the limit."""
    half = (math.log1p(change.high) - math.log1p(change.low)) / 2
    distance = max(abs(math.log1p(change.value) - math.log1p(limit)), math.log1p(limit) / 10)
    wait_s = change.n * (half / distance) ** 2 * 1.2 * pair_s if math.isfinite(half) else math.inf
    return f"{max(1, math.ceil(wait_s / 60))} minutes" if wait_s < MAX_WAIT_S else "more than a day"


# Whether two programs learn the same: the verdict of `flatout compare --same-training`.
#
#     same         every batch, loss and weight is equal, bit by bit
#     equivalent   batches are equal, losses pass the guard as those of a lever that rounds, and at every step the
#                  weights of each parameter differ by no more than rounding would make them differ
#     different    one of these checks fails
#     cannot tell  one could not be made, or A does not repeat itself
#
# How far rounding spreads is measured: runs of A that round every product to fewer bits (`flatout.guard.perturb`).

# Harmful edits: from 42 (bench/same_training.py)
MAX_GROWTH = 12.0
RESOLUTION = 2.0**-22  # share of a tensor: float32's last place
MIN_STEPS, PERTURBED_SEEDS = 3, 2
Sketches = dict[str, list[float]]
Runs = Sequence[TrialRecord]


def training_verdict(timer: PairTimer, repeat: TrialRecord | None, half: bool) -> TrainingVerdict:
    """Compare the pairs. ``repeat``: a second run of A's first seed. ``half``: B may use half precision."""
    if repeat is None:
        return TrainingVerdict("cannot tell", "A failed when it ran again")
    effect = Effect.PRECISION if half else Effect.ROUNDING

    def perturbed() -> Runs:
        seeds = [pair.seed for pair in timer.pairs[:PERTURBED_SEEDS]]
        runs = [timer.repeat(seed, perturbation_for(effect)) for seed in seeds]
        return [run for run in runs if run is not None]

    a = [pair.a.record for pair in timer.pairs]
    b = [pair.b.record for pair in timer.pairs if pair.b is not None]
    return judge_training(a, b, [repeat], perturbed, effect)


def judge_training(
    a: Runs, b: Runs, repeats: Runs, perturb: Callable[[], Runs], effect: Effect = Effect.ROUNDING
) -> TrainingVerdict:
    """Compare runs with the same seeds, ``a[i]`` and ``b[i]``.

    ``repeats``: second runs of A. ``perturb``: returns runs of A perturbed by ``perturbation_for(effect)``, and is
    called if bits differ. ``effect``: what B may change, ROUNDING or PRECISION. Records have sketches of the weights."""
    exact = judge(Effect.EXACT, a, b, repeats=repeats)
    batches = sum(min(len(x.batch_hashes), len(y.batch_hashes)) for x, y in zip(a, b, strict=True))
    if exact.verdict == "same" and all(_same_batches(x, y) for x, y in zip(a, b, strict=True)):
        return TrainingVerdict("same", f"{exact.why}, and {batches} batches")
    seeds = {run.seed: run for run in a}
    if not all(repeats_itself(seeds[run.seed], run) for run in repeats):
        verdict = "different" if exact.verdict == "failed" else "cannot tell"
        return TrainingVerdict(verdict, exact.why)
    perturbed = perturb()
    rounded = judge(effect, a, b, None, repeats, perturbed)
    step, tensor, why = _beyond_rounding(a, b, perturbed)
    failed = [why] if step is not None else []
    failed += [rounded.why] if rounded.verdict == "failed" else []
    if failed:
        return TrainingVerdict("different", "; ".join(failed), step, tensor)
    if why or rounded.verdict != "equivalent":
        return TrainingVerdict("cannot tell", why or rounded.why)
    steps = sorted({int(step) for run in perturbed for step in run.weights_sketches})
    compared = (
        f"each weight after {len(steps)} steps, the last of them step {steps[-1]}, and {batches} batches"
    )
    kind = "up to half precision" if effect is Effect.PRECISION else "up to rounding"
    return TrainingVerdict("equivalent", f"{kind}: {compared}; {rounded.why}")


def _same_batches(a: TrialRecord, b: TrialRecord) -> bool:
    return all(x == y for x, y in zip(a.batch_hashes, b.batch_hashes, strict=False))


def _beyond_rounding(a: Runs, b: Runs, perturbed: Runs) -> tuple[int | None, str, str]:
    """The first step and tensor whose difference rounding does not explain, and why; or why it is unknown."""
    sides, steps = {x.seed: (x, y) for x, y in zip(a, b, strict=True)}, set[str]()
    for run in perturbed:
        plain, other = (side.weights_sketches for side in sides[run.seed])
        common = sorted(plain.keys() & other.keys() & run.weights_sketches.keys(), key=int)
        steps.update(common)
        for step in common:
            pairs = _matched(plain[step], other[step])
            if pairs is None:
                counts = (
                    f"{len(plain[step])} and {len(other[step])} parameters and buffers, or others in shape"
                )
                return int(step), "", f"the programs have {counts}"
            growth, name = max(
                (_growth(x, y, run.weights_sketches[step][name]), name) for name, x, y in pairs
            )
            if not growth <= MAX_GROWTH:
                times = (
                    f"{growth:.2g} times as far as rounding moves it"
                    if math.isfinite(growth)
                    else "NaN or infinite"
                )
                return int(step), name, f"after step {step}, {name} differs: {times} (seed {run.seed})"
    if len(steps) < MIN_STEPS:
        return None, "", f"the weights of {len(steps)} steps could be compared, of at least {MIN_STEPS}"
    return None, "", ""


def _matched(a: Sketches, b: Sketches) -> list[tuple[str, list[float], list[float]]] | None:
    """Pairs of sketches, by name, or in order if names differ; None if they do not match."""
    if a.keys() != b.keys():
        b = dict(zip(a, b.values(), strict=False))
    if a.keys() != b.keys() or any(len(a[name]) != len(b[name]) for name in a):
        return None
    return [(name, a[name], b[name]) for name in a]


def _growth(a: list[float], b: list[float], perturbed: list[float]) -> float:
    """The distance of B from A, relative to that of the perturbed run. Infinite if it is not a number."""
    scale = math.dist(a, perturbed) + RESOLUTION * math.hypot(*a)
    distance = math.dist(a, b)
    growth = distance / scale if scale else math.inf if distance else 0.0
    return growth if growth == growth else math.inf
