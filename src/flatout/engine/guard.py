"""The guard's verdict: do these records show the same training?

Pure functions over records; nothing runs here.

    EXACT      losses and weights equal those of the plain run with the same seed, bit for bit
    ROUNDING   the step replica passes (flatout.engine.replica). The first losses equal those of the plain run
               up to rounding, or diverge no faster than those of the plain program with weights perturbed in
               the last place. The loss curves stay within the spread of the script's own runs with other seeds
    PRECISION  the same, with the last place of half precision
    RESAMPLED  the batches have the same distribution (flatout.engine.distribution), and the loss curves stay
               within that spread

For every effect, the losses must have the resolution of the plain program's: a loss in half precision has
only 8 or 11 significant bits. A script that is not repeatable is judged by the loss curves alone, and the
verdict says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from flatout.engine.distribution import same_distribution
from flatout.engine.resolution import SHORT_SHARE, coarseness
from flatout.plan.enums import Effect
from flatout.plan.records import GuardCheck, GuardRecord, TrialRecord

WINDOWS = 8
CURVE_LIMIT = 2.0  # two independent runs of one script are 1.41 apart on this scale
SHIFT_LIMIT = 1.0
FEWEST_LOSSES = 2
START_STEPS = 8  # later, a sound lever's rounding may be amplified, and the spread of seeds is the scale
START_LIMIT = 0.04
FEWEST_FIRST_LOSSES = 8
ROUNDING_GROWTH = 30.0  # in a smooth network, the first losses moved by up to 3 times the gradient error
LOSS_RESOLUTION = 2.0**-20  # float32 sums a loss to about 2^-22
# Share of every weight: four units in float32's last place, about the total rounding of one step.
PERTURBATION = 2.0**-21
HALF_PERTURBATION = 2.0**-9  # bfloat16 rounds by up to this share, in every product (flatout.engine.perturb)
# How much further than the perturbed plain program a sound lever may diverge, over all seeds and over one
# seed, where chance counts. Sound: up to 7.7 times (channels_last, ResNet-18 with a large step); broken: from
# 60.
PERTURBED_GROWTH, PERTURBED_GROWTH_ALONE = 10.0, 30.0
# Sound: up to 2.9 times (bfloat16, Adadelta with a rate of 1.0); broken: from 12.
HALF_GROWTH, HALF_GROWTH_ALONE = 6.0, 10.0
TINY = 1e-300


def judge(
    effect: Effect,
    plain: Sequence[TrialRecord],
    tuned: Sequence[TrialRecord],
    replica: dict[str, Any] | None = None,
    again: TrialRecord | None = None,
    perturbed: Sequence[TrialRecord] = (),
    late: dict[str, Any] | None = None,
) -> GuardRecord:
    """Compare runs seed by seed: ``plain[i]`` and ``tuned[i]`` had the same seed.

    ``effect`` is the widest of the Plan's levers. ``replica`` is the answer of a step replica, and ``late``
    that of one after a stretch of training. ``again`` is a second plain run with the first seed, which shows
    whether the script is repeatable. ``perturbed`` are plain runs perturbed by ``perturbation_for(effect)`` from the
    first step (flatout.engine.perturb). They show how fast this program amplifies rounding. Raises ValueError
    on empty input.
    """
    if not plain or len(plain) != len(tuned):
        raise ValueError("the guard needs as many tuned runs as plain ones, and at least one")
    curves = [_aligned(p, t) for p, t in zip(plain, tuned, strict=True)]
    record = GuardRecord(
        "failed",
        "",
        seeds=[p.seed or 0 for p in plain],
        plain_losses=[p for p, _ in curves],
        tuned_losses=[t for _, t in curves],
    )
    checks = record.checks
    shortest = min(len(p) for p, _ in curves)
    if shortest < FEWEST_LOSSES:
        record.verdict, record.why = (
            "not checked",
            f"only {shortest} losses were recorded, too few to compare",
        )
        return record
    repeatable = again is None or repeats_itself(plain[0], again)
    checks += [_finite(curves), _resolution(curves)]
    if effect is Effect.EXACT and repeatable:
        checks += [_bitwise_losses(plain, tuned), _bitwise_weights(plain, tuned)]
    else:
        if effect.rank < Effect.RESAMPLED.rank and repeatable:
            checks += _same_batches(plain, tuned)
        if effect is Effect.RESAMPLED:
            checks += same_distribution(list(zip(plain, tuned, strict=True)))
        elif repeatable:
            checks += _start(
                plain, tuned, replica or {}, perturbed, _most_growth(effect, alone=len(perturbed) == 1)
            )
        checks += [*_info(replica), *_info(late, "late ", "after a stretch of training ")]
        checks.append(_curves_within_spread(curves))
    failed = [c for c in checks if not c.passed]
    if failed:
        record.why = "; ".join(c.why for c in failed)
        return record
    if effect is Effect.EXACT and repeatable:
        record.verdict = "same"
        record.why = f"losses and weights are bitwise equal to those of the plain program ({shortest} losses, {_count(len(plain), 'seed')})"
        return record
    record.verdict = "equivalent"
    record.why = f"the loss stays within the spread of the program's own seeds ({shortest} losses, {_count(len(plain), 'seed')})"
    if not repeatable:
        record.why += (
            "; the program is not repeatable even with one seed, so only this weaker comparison is possible"
        )
    elif replica is not None and "checks" in replica:
        record.why = next((c.why for c in checks if c.name == "gradient"), "") + "; " + record.why
    elif replica is not None:
        record.why += f"; the gradient could not be checked: {replica.get('failure', 'no answer')}"
    return record


def needs_perturbed_runs(found: GuardRecord) -> bool:
    """Whether only the first losses fail: perturbed runs of the plain program then decide."""
    return [check.name for check in found.checks if not check.passed] == ["start"]


def perturbation_for(effect: Effect) -> float:
    """How far to perturb a plain run to show how this program amplifies a lever's rounding."""
    return HALF_PERTURBATION if effect is Effect.PRECISION else PERTURBATION


def start_agrees(
    effect: Effect, plain: TrialRecord, alone: TrialRecord, perturbed: Sequence[TrialRecord] = ()
) -> GuardCheck | None:
    """Whether the first losses of one lever agree with the plain run of the same seed.

    This narrows down which lever of a rejected plan is to blame. ``perturbed``: plain runs moved by
    ``perturbation_for(effect)``; one with this seed is enough. Returns None if nothing can be decided: fewer than
    ``FEWEST_FIRST_LOSSES`` losses, no perturbed run, losses of the plain run that are not finite, or a lever
    that draws other batches.
    """
    curve = _aligned(plain, alone)
    length = min(sum(step <= START_STEPS for step in plain.loss_steps), len(curve[0]))
    first = (curve[0][:length], curve[1][:length])
    perturbed = [each for each in perturbed if each.seed == plain.seed]
    if (
        length < FEWEST_FIRST_LOSSES
        or effect.rank >= Effect.RESAMPLED.rank
        or not all(map(math.isfinite, first[0]))
    ):
        return None
    for found in (_finite([first]), _resolution([first])):
        if not found.passed:
            return found
    if effect is Effect.EXACT:
        return _bitwise_losses([plain], [alone])
    if not perturbed:
        return None
    return next(iter(_start([plain], [alone], {}, perturbed, _most_growth(effect, alone=True))), None)


def _most_growth(effect: Effect, alone: bool = False) -> float:
    if effect is Effect.PRECISION:
        return HALF_GROWTH_ALONE if alone else HALF_GROWTH
    return PERTURBED_GROWTH_ALONE if alone else PERTURBED_GROWTH


def _info(replica: dict[str, Any] | None, prefix: str = "", when: str = "") -> list[GuardCheck]:
    return [
        GuardCheck(prefix + c["name"], c["passed"], when + c["why"], c["value"], c["limit"])
        for c in (replica or {}).get("checks", ())
    ]


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _aligned(plain: TrialRecord, tuned: TrialRecord) -> tuple[list[float], list[float]]:
    length = min(len(plain.losses), len(tuned.losses))
    return [float.fromhex(x) for x in plain.losses[:length]], [
        float.fromhex(x) for x in tuned.losses[:length]
    ]


def repeats_itself(plain: TrialRecord, again: TrialRecord) -> bool:
    """Whether a second plain run with the same seed has the same losses and weights, as far as both ran."""
    length = min(len(plain.losses), len(again.losses))
    return plain.losses[:length] == again.losses[:length] and _bitwise_weights([plain], [again]).passed


def _finite(curves: Sequence[tuple[list[float], list[float]]]) -> GuardCheck:
    bad = [
        at
        for p, t in curves
        for at, (x, y) in enumerate(zip(p, t, strict=True))
        if math.isfinite(x) and not math.isfinite(y)
    ]
    return GuardCheck(
        "finite",
        not bad,
        f"loss {bad[0]} is not finite, but the plain program's is"
        if bad
        else "every loss is finite if the plain one is",
    )


def _resolution(curves: Sequence[tuple[list[float], list[float]]]) -> GuardCheck:
    plain, tuned = (coarseness(side) for side in zip(*curves, strict=True))
    why = f"{tuned:.0%} of the losses have only the digits of half precision or repeat another loss; {plain:.0%} of the plain program's"
    return GuardCheck("resolution", tuned - plain <= SHORT_SHARE, why, max(0.0, tuned - plain), SHORT_SHARE)


def _bitwise_losses(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> GuardCheck:
    for p, t in zip(plain, tuned, strict=True):
        for at, (x, y) in enumerate(zip(p.losses, t.losses, strict=False)):
            if x != y:
                return GuardCheck(
                    "losses",
                    False,
                    f"loss {at} is {float.fromhex(y):.9g}, and {float.fromhex(x):.9g} in the plain program (seed {p.seed})",
                )
    return GuardCheck("losses", True, "every loss is bitwise equal")


def _bitwise_weights(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> GuardCheck:
    seen = 0
    for p, t in zip(plain, tuned, strict=True):
        for step, digest in p.weights_digests.items():
            if step in t.weights_digests:
                seen += 1
                if t.weights_digests[step] != digest:
                    return GuardCheck(
                        "weights",
                        False,
                        f"the weights after step {step} differ from the plain program's (seed {p.seed})",
                    )
    return GuardCheck(
        "weights",
        True,
        f"the weights are bitwise equal after {seen} common steps"
        if seen
        else "no common step recorded weights",
    )


def _same_batches(plain: Sequence[TrialRecord], tuned: Sequence[TrialRecord]) -> list[GuardCheck]:
    if not plain[0].context.get("loaders"):
        return []  # without a loader, inputs may depend on the model (a GAN, a policy)
    for p, t in zip(plain, tuned, strict=True):
        for at, (x, y) in enumerate(zip(p.batch_hashes, t.batch_hashes, strict=False)):
            if x != y:
                return [
                    GuardCheck(
                        "batches", False, f"batch {at} differs from the plain program's (seed {p.seed})"
                    )
                ]
    return [GuardCheck("batches", True, "every batch is bitwise equal")]


def _start(
    plain: Sequence[TrialRecord],
    tuned: Sequence[TrialRecord],
    replica: dict[str, Any],
    perturbed: Sequence[TrialRecord],
    growth: float,
) -> list[GuardCheck]:
    """Compare the losses of the first steps, pair by pair, with the spread of the seeds at the same steps.

    In a smooth network they cannot differ by more than the gradient error that the replica measured. With
    kinks (ReLU, max-pooling), or without a replica, they may differ by a small share of the spread.
    """
    perturbed = [s for s in perturbed if any(s.seed == p.seed for p in plain)]
    counts = [sum(step <= START_STEPS for step in p.loss_steps) for p in plain]
    curves = [
        (p[:n], t[:n])
        for n, (p, t) in zip(counts, (_aligned(p, t) for p, t in zip(plain, tuned, strict=True)), strict=True)
    ]
    length = min(len(p) for p, _ in curves)
    everything = [x for p, t in curves for x in (*p[:length], *t[:length])]
    unit = max(map(abs, everything), default=0.0)
    if not 0 < unit < math.inf:
        return []
    one, other = (
        [[x / unit for x in side[:length]] for side in sides] for sides in zip(*curves, strict=True)
    )
    distance = _rms([y - x for p, t in zip(one, other, strict=True) for x, y in zip(p, t, strict=True)])
    if distance == 0:
        return [GuardCheck("start", True, "the first losses coincide", 0.0, START_LIMIT)]
    spread, scale = _scale(one)
    if spread == 0:
        return [GuardCheck("start", False, "the first losses differ, and the plain program's are constant")]
    limit, error = (
        START_LIMIT,
        next((c["value"] for c in replica.get("checks", ()) if c["name"] == "gradient"), None),
    )
    if replica.get("smooth") and error is not None:
        limit = min(
            limit, ROUNDING_GROWTH * error + LOSS_RESOLUTION * _rms([x for p in one for x in p]) / spread
        )
    value = distance / spread
    if value > limit and perturbed:
        return [
            _carried(
                plain, tuned, perturbed, length, limit * spread * unit, growth, f"{value:.2g} of {scale}"
            )
        ]
    return [
        GuardCheck(
            "start",
            value <= limit,
            f"the losses of the first {START_STEPS} steps differ by {value:.2g} of {scale}",
            value,
            limit,
        )
    ]


def _carried(
    plain: Sequence[TrialRecord],
    tuned: Sequence[TrialRecord],
    perturbed: Sequence[TrialRecord],
    length: int,
    least: float,
    growth: float,
    apart: str,
) -> GuardCheck:
    """Whether the first losses diverge no faster than those of the plain program perturbed in the last place.

    A large step on a young network amplifies one rounding to a tenth of the loss within three steps. A defect
    of a lever shows at once; its rounding grows as rounding does. Distances up to ``least`` are accepted
    anyway.
    """
    # One seed may amplify rounding a hundred times as fast as another.
    seeds, moved = {p.seed: p for p in plain}, {s.seed for s in perturbed}
    mine = _growth([_aligned(p, t) for p, t in zip(plain, tuned, strict=True) if p.seed in moved], length)
    rounding = _growth([_aligned(seeds[s.seed], s) for s in perturbed], length)
    unit = max((abs(float.fromhex(x)) for p in plain for x in p.losses[:length]), default=1.0)
    ratios = [
        m / max(r + LOSS_RESOLUTION * unit, TINY)
        for m, r in zip(mine, rounding, strict=False)
        if not m <= least
    ]
    worst = max(
        (ratio if ratio == ratio else math.inf for ratio in ratios), default=0.0 if rounding else math.inf
    )  # NaN: no measure
    why = f"the losses of the first {START_STEPS} steps differ by {apart}; at most {worst:.2g} times the growth of one rounding in this program"
    return GuardCheck("start", worst <= growth, why, worst, growth)


def _growth(curves: Sequence[tuple[list[float], list[float]]], length: int) -> list[float]:
    """Root mean square distance up to each of the first losses, over all runs."""
    return [
        _rms([y - x for p, t in curves for x, y in zip(p[:at], t[:at], strict=True)])
        for at in range(1, length + 1)
    ]


def _curves_within_spread(curves: Sequence[tuple[list[float], list[float]]]) -> GuardCheck:
    """Compare windows of tuned and plain loss curves, relative to the spread of the plain seeds."""
    length = min(len(p) for p, _ in curves)
    # If the plain program's own loss is not finite, there is nothing to compare with.
    length = min([length, *(at for p, _ in curves for at, x in enumerate(p) if not math.isfinite(x))])
    plain, tuned = ([side[:length] for side in sides] for sides in zip(*curves, strict=True))
    unit = max((abs(x) for curve in (*plain, *tuned) for x in curve), default=0.0)
    if not length or unit == 0:
        return GuardCheck(
            "curve",
            True,
            "the loss curves coincide" if length else "the plain program's loss is not finite from the start",
            0.0,
            CURVE_LIMIT,
        )
    if not unit < math.inf:
        return GuardCheck("curve", False, "the loss curve is not finite")
    plain, tuned = ([_windows(curve, unit) for curve in side] for side in (plain, tuned))
    gaps = [y - x for p, t in zip(plain, tuned, strict=True) for x, y in zip(p, t, strict=True)]
    distance, shift = _rms(gaps), abs(sum(gaps) / len(gaps))
    if distance == 0:
        return GuardCheck("curve", True, "the loss curves coincide", 0.0, CURVE_LIMIT)
    spread, scale = _scale(plain)
    if spread == 0:
        return GuardCheck("curve", False, "the loss curves differ, and the plain program's is constant")
    value, moved = distance / spread, shift / spread
    why = f"the loss curves differ by {value:.2g} of {scale}, with a mean shift of {moved:.2g}"
    return GuardCheck(
        "curve",
        value <= CURVE_LIMIT and moved <= SHIFT_LIMIT,
        why,
        max(value, moved * CURVE_LIMIT / SHIFT_LIMIT),
        CURVE_LIMIT,
    )


def _windows(curve: list[float], unit: float) -> list[float]:
    """Means over at most WINDOWS windows, in units that keep the sums finite."""
    count = min(WINDOWS, len(curve))
    edges = [round(i * len(curve) / count) for i in range(count + 1)]
    return [sum(x / unit for x in curve[a:b]) / (b - a) for a, b in pairwise(edges)]


def _scale(plain: list[list[float]]) -> tuple[float, str]:
    """Root mean square over positions of the standard deviation over seeds, and its description."""
    variances = []
    for values in zip(*plain, strict=True) if len(plain) > 1 else ():
        mean = sum(values) / len(values)
        variances.append(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    spread = math.sqrt(sum(variances) / len(variances)) if variances else 0.0
    if spread:
        return spread, "the spread of the program's own seeds"
    # One seed, or a program that ignores the seed: its own movement is the only scale.
    moves = [abs(b - a) for curve in plain for a, b in pairwise(curve)]
    return (
        sum(moves) / len(moves) / 2 if moves else 0.0
    ), "half of the loss's own movement (no spread of seeds was measured)"


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else 0.0
