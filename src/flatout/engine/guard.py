"""The guard's verdict: do these records show the same training? Pure functions over records; nothing is run here.

    EXACT      losses and weights are those of the plain run with the same seed, bit for bit
    ROUNDING   the step replica holds (flatout.engine.replica), and the loss curves stay within the spread of the script's
               own runs with other seeds
    RESAMPLED  the batches come from the same distribution, and the loss curves stay within that spread

A script that is not repeatable by itself is judged by the loss curves alone, and the verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from flatout.measure.statistics import two_sample_ks
from flatout.plan.records import GuardCheck, GuardRecord, TrialRecord
from flatout.plan.words import Effect

WINDOWS = 8
CURVE_LIMIT = 2.0  # two independent runs of one script are 1.41 apart on this scale
SHIFT_LIMIT = 1.0
DISTRIBUTION_P = 1e-4  # for each of the four statistics of a sample
FEWEST_LOSSES = 2


def judge(effect: Effect, plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord], replica: dict[str, Any] | None = None,
          again: TrialRecord | None = None) -> GuardRecord:
    """Compare runs seed by seed: ``plain[i]`` and ``tuned[i]`` had the same seed.

    ``effect`` is the widest of the Plan's levers; ``replica`` is the answer of a step replica; ``again`` is a second
    plain run with the first seed, which tells whether the script repeats itself. Raises ValueError on empty input.
    """
    if not plain or len(plain) != len(tuned):
        raise ValueError("the guard needs as many tuned runs as plain ones, and at least one")
    curves = [_aligned(p, t) for p, t in zip(plain, tuned, strict=True)]
    record = GuardRecord("failed", "", seeds=[p.seed or 0 for p in plain], plain_losses=[p for p, _ in curves], tuned_losses=[t for _, t in curves])
    checks = record.checks
    shortest = min(len(p) for p, _ in curves)
    if shortest < FEWEST_LOSSES:
        record.verdict, record.why = "not checked", f"only {shortest} losses were seen, too few to compare"
        return record
    repeatable = again is None or _same_losses(plain[0], again)
    checks.append(_finite(curves))
    if effect is Effect.EXACT and repeatable:
        checks += [_bitwise_losses(plain, tuned), _bitwise_weights(plain, tuned)]
    else:
        if effect.rank < Effect.RESAMPLED.rank and repeatable:
            checks += _same_batches(plain, tuned)
        if effect is Effect.RESAMPLED:
            checks += _same_distribution(plain, tuned)
        if replica is not None and "checks" in replica:
            checks += [GuardCheck(c["name"], c["passed"], c["why"], c["value"], c["limit"]) for c in replica["checks"]]
        checks.append(_curves_within_spread(curves))
    failed = [c for c in checks if not c.passed]
    if failed:
        record.why = "; ".join(c.why for c in failed)
        return record
    if effect is Effect.EXACT and repeatable:
        record.verdict = "same"
        record.why = f"losses and weights are bitwise those of the plain program ({shortest} losses, {_count(len(plain), 'seed')})"
        return record
    record.verdict = "equivalent"
    record.why = f"the loss stays within the spread of the program's own seeds ({shortest} losses, {_count(len(plain), 'seed')})"
    if not repeatable:
        record.why += "; the program does not repeat itself even with one seed, so this weaker comparison is all there is"
    elif replica is not None and "checks" in replica:
        record.why = next((c.why for c in checks if c.name == "gradient"), "") + "; " + record.why
    elif replica is not None:
        record.why += f"; the gradient could not be checked: {replica.get('failure', 'no answer')}"
    return record


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _aligned(plain: TrialRecord, tuned: TrialRecord) -> tuple[list[float], list[float]]:
    length = min(len(plain.losses), len(tuned.losses))
    return [float.fromhex(x) for x in plain.losses[:length]], [float.fromhex(x) for x in tuned.losses[:length]]


def _same_losses(a: TrialRecord, b: TrialRecord) -> bool:
    length = min(len(a.losses), len(b.losses))
    return a.losses[:length] == b.losses[:length]


def _finite(curves: Sequence[tuple[list[float], list[float]]]) -> GuardCheck:
    bad = [at for p, t in curves for at, (x, y) in enumerate(zip(p, t, strict=True)) if math.isfinite(x) and not math.isfinite(y)]
    return GuardCheck("finite", not bad, f"loss {bad[0]} is not finite where the plain program's is" if bad else "every loss is finite where the plain one is")


def _bitwise_losses(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> GuardCheck:
    for p, t in zip(plain, tuned, strict=True):
        for at, (x, y) in enumerate(zip(p.losses, t.losses, strict=False)):
            if x != y:
                return GuardCheck("losses", False, f"loss {at} is {float.fromhex(y):.9g}, and {float.fromhex(x):.9g} in the plain program (seed {p.seed})")
    return GuardCheck("losses", True, "every loss is bitwise the same")


def _bitwise_weights(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> GuardCheck:
    seen = 0
    for p, t in zip(plain, tuned, strict=True):
        for step, digest in p.weights_digests.items():
            if step in t.weights_digests:
                seen += 1
                if t.weights_digests[step] != digest:
                    return GuardCheck("weights", False, f"the weights after step {step} differ from the plain program's (seed {p.seed})")
    return GuardCheck("weights", True, f"the weights are bitwise the same after {seen} common steps" if seen else "no common step's weights were seen")


def _same_batches(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> list[GuardCheck]:
    if not plain[0].scene.get("loaders"):
        return []  # without a loader what enters the model may depend on the model (a GAN, a policy)
    for p, t in zip(plain, tuned, strict=True):
        for at, (x, y) in enumerate(zip(p.batch_hashes, t.batch_hashes, strict=False)):
            if x != y:
                return [GuardCheck("batches", False, f"batch {at} is not the plain program's (seed {p.seed})")]
    return [GuardCheck("batches", True, "every batch is bitwise the same")]


def _same_distribution(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> list[GuardCheck]:
    a = [row for p in plain for row in p.batch_statistics]
    b = [row for t in tuned for row in t.batch_statistics]
    if not a or not b:
        return []
    names = ("mean", "deviation", "left against right", "top against bottom")
    worst = min(((two_sample_ks([r[i] for r in a], [r[i] for r in b]), name) for i, name in enumerate(names)), key=lambda pair: pair[0])
    why = f"over {len(a)} and {len(b)} samples the {worst[1]} of a sample fits the plain program's with p = {worst[0]:.2g}"
    return [GuardCheck("distribution", worst[0] >= DISTRIBUTION_P, why, worst[0], DISTRIBUTION_P)]


def _curves_within_spread(curves: Sequence[tuple[list[float], list[float]]]) -> GuardCheck:
    """Windows of the loss curves: how far a tuned run is from its plain twin, beside how far the plain seeds are from each other."""
    length = min(len(p) for p, _ in curves)
    count = min(WINDOWS, length)
    edges = [round(i * length / count) for i in range(count + 1)]

    def windows(curve: list[float]) -> list[float]:
        return [sum(curve[a:b]) / (b - a) for a, b in pairwise(edges)]

    plain, tuned = [windows(p) for p, _ in curves], [windows(t) for _, t in curves]
    gaps = [y - x for p, t in zip(plain, tuned, strict=True) for x, y in zip(p, t, strict=True)]
    if not all(map(math.isfinite, gaps)):
        both = all(not math.isfinite(x) for p in plain for x in p[-1:])
        return GuardCheck("curve", both, "both programs diverge" if both else "the loss curve leaves the finite numbers")
    distance = math.sqrt(sum(g * g for g in gaps) / len(gaps))
    shift = abs(sum(gaps) / len(gaps))
    if distance == 0:
        return GuardCheck("curve", True, "the loss curves coincide", 0.0, CURVE_LIMIT)
    spread = _spread(plain)
    if spread == 0:
        # One seed, or a program that ignores ours: its own step-to-step movement is the only scale there is.
        moves = [abs(b - a) for p, _ in curves for a, b in pairwise(p)]
        spread = sum(moves) / len(moves) / 2 if moves else 0.0
        scale = "half of what the loss moves from step to step (no spread of seeds was seen)"
    else:
        scale = "the spread of the program's own seeds"
    if spread == 0:
        return GuardCheck("curve", False, "the loss curves differ, and the plain program's never moves")
    value, moved = distance / spread, shift / spread
    why = f"the loss curves differ by {value:.2g} of {scale}, with a mean shift of {moved:.2g}"
    return GuardCheck("curve", value <= CURVE_LIMIT and moved <= SHIFT_LIMIT, why, max(value, moved * CURVE_LIMIT / SHIFT_LIMIT), CURVE_LIMIT)


def _spread(plain: list[list[float]]) -> float:
    """Root mean square over windows of the standard deviation over seeds."""
    if len(plain) < 2:
        return 0.0
    variances = []
    for values in zip(*plain, strict=True):
        mean = sum(values) / len(values)
        variances.append(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    return math.sqrt(sum(variances) / len(variances))
