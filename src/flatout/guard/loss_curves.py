"""Do the loss curves of two runs agree: at the start, and within the spread of the seeds?"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from flatout.measure.statistics import estimate
from flatout.schema.records import TrialRecord
from flatout.schema.session import GuardCheck

Curves = Sequence[tuple[list[float], list[float]]]  # the losses of a plain and of a tuned run, by seed

WINDOWS = 8
CURVE_LIMIT = 2.0  # two independent runs of one script are 1.41 apart on this scale
SHIFT_LIMIT = 1.0
HARM_POWER = 0.95  # the chance of finding the harm that a verdict names
START_STEPS = 8  # later, a sound lever's rounding may be amplified, and the spread of seeds is the scale
START_LIMIT = 0.04
ROUNDING_GROWTH = 30.0  # in a smooth network, the first losses moved by up to 3 times the gradient error
LOSS_RESOLUTION = 2.0**-20  # float32 sums a loss to about 2^-22
TINY = 1e-300


def common_losses(plain: TrialRecord, tuned: TrialRecord) -> tuple[list[float], list[float]]:
    length = min(len(plain.losses), len(tuned.losses))
    return [float.fromhex(x) for x in plain.losses[:length]], [
        float.fromhex(x) for x in tuned.losses[:length]
    ]


def finite_count(losses: Sequence[str]) -> int:
    """Return how many losses there are before the last ones, which are all NaN or infinite."""
    count = len(losses)
    while count and not math.isfinite(float.fromhex(losses[count - 1])):
        count -= 1
    return count


def nonfinite_loss(plain: TrialRecord) -> str:
    """Return ``the program's own loss is NaN from step 20``; "" if a plain run ends with a finite loss."""
    i = finite_count(plain.losses)
    if i == len(plain.losses):
        return ""
    kind = "NaN" if "nan" in plain.losses[i:] else "infinite"
    return f"the program's own loss is {kind} from step {plain.loss_steps[i]}"


def common_length(curves: Curves) -> int:
    """Return the length of the shortest curve, up to the first loss that is NaN or infinite."""
    ends = [
        next((i for i, x in enumerate(c) if not math.isfinite(x)), len(c)) for pair in curves for c in pair
    ]
    return min(ends, default=0)


def finite_losses(curves: Curves) -> GuardCheck:
    nonfinite = [
        i
        for p, t in curves
        for i, (x, y) in enumerate(zip(p, t, strict=True))
        if math.isfinite(x) and not math.isfinite(y)
    ]
    if nonfinite:
        return GuardCheck("finite", False, f"loss {nonfinite[0]} is not finite, but the plain program's is")
    return GuardCheck("finite", True, "every loss is finite if the plain one is")


def start_check(
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
    pairs = map(common_losses, plain, tuned)
    curves = [(p[:n], t[:n]) for n, (p, t) in zip(counts, pairs, strict=True)]
    length = common_length(curves)
    losses = [x for p, t in curves for x in (*p[:length], *t[:length])]
    unit = max(map(abs, losses), default=0.0)
    if not length:
        return [GuardCheck("start", None, "the first loss is not finite")]
    if not unit:
        return [GuardCheck("start", True, "the first losses coincide", 0.0, START_LIMIT)]
    plain_units, tuned_units = (
        [[x / unit for x in side[:length]] for side in sides] for sides in zip(*curves, strict=True)
    )
    distance = _rms(
        [y - x for p, t in zip(plain_units, tuned_units, strict=True) for x, y in zip(p, t, strict=True)]
    )
    if distance == 0:
        return [GuardCheck("start", True, "the first losses coincide", 0.0, START_LIMIT)]
    spread, scale = _scale(plain_units)
    if spread == 0:
        return [GuardCheck("start", False, "the first losses differ, and the plain program's are constant")]
    limit = START_LIMIT
    error = next((c["value"] for c in replica.get("checks", ()) if c["name"] == "gradient"), None)
    if replica.get("smooth") and error is not None:
        limit = min(
            limit,
            ROUNDING_GROWTH * error + LOSS_RESOLUTION * _rms([x for p in plain_units for x in p]) / spread,
        )
    value = distance / spread
    words = f"{value:.2g} times {scale}"
    if value > limit and perturbed:
        accepted = limit * spread * unit
        return [_check_growth(plain, tuned, perturbed, length, accepted, growth, words)]
    why = f"the losses of the first {START_STEPS} steps differ by {words}"
    return [GuardCheck("start", value <= limit, why, value, limit)]


def _check_growth(
    plain: Sequence[TrialRecord],
    tuned: Sequence[TrialRecord],
    perturbed: Sequence[TrialRecord],
    length: int,
    accepted: float,
    growth: float,
    difference: str,
) -> GuardCheck:
    """Whether the first losses diverge no faster than those of the plain program perturbed in the last place.

    A large step on a young network amplifies one rounding to a tenth of the loss within three steps. A defect
    of a lever shows at once; its rounding grows as rounding does. Distances up to ``accepted`` are accepted
    anyway.
    """
    # One seed may amplify rounding a hundred times as fast as another.
    seeds, perturbed_seeds = {p.seed: p for p in plain}, {s.seed for s in perturbed}
    lever_growth = _growth(
        [common_losses(p, t) for p, t in zip(plain, tuned, strict=True) if p.seed in perturbed_seeds], length
    )
    rounding_growth = _growth([common_losses(seeds[s.seed], s) for s in perturbed], length)
    unit = max((abs(float.fromhex(x)) for p in plain for x in p.losses[:length]), default=1.0)
    ratios = [
        m / max(r + LOSS_RESOLUTION * unit, TINY)
        for m, r in zip(lever_growth, rounding_growth, strict=False)
        if not m <= accepted
    ]
    worst = max(
        (ratio if ratio == ratio else math.inf for ratio in ratios),
        default=0.0 if rounding_growth else math.inf,
    )  # NaN: no measure
    why = f"the losses of the first {START_STEPS} steps differ by {difference}; at most {worst:.2g} times the growth of one rounding in this program"
    return GuardCheck("start", worst <= growth, why, worst, growth)


def _growth(curves: Curves, length: int) -> list[float]:
    """Root mean square distance up to each of the first losses, over all runs."""
    return [
        _rms([y - x for p, t in curves for x, y in zip(p[:i], t[:i], strict=True)])
        for i in range(1, length + 1)
    ]


def curves_within_spread(curves: Curves) -> GuardCheck:
    """Compare windows of tuned and plain loss curves, relative to the spread of the plain seeds."""
    plain, tuned, unit = _in_windows(curves)
    if not plain[0]:
        return GuardCheck("curve", None, "the first loss is not finite")
    if unit == 0:
        return GuardCheck("curve", True, "the loss curves coincide", 0.0, CURVE_LIMIT)
    gaps = [y - x for p, t in zip(plain, tuned, strict=True) for x, y in zip(p, t, strict=True)]
    distance, shift = _rms(gaps), abs(sum(gaps) / len(gaps))
    if distance == 0:
        return GuardCheck("curve", True, "the loss curves coincide", 0.0, CURVE_LIMIT)
    spread, scale = _scale(plain)
    if spread == 0:
        return GuardCheck("curve", False, "the loss curves differ, and the plain program's is constant")
    value, moved = distance / spread, shift / spread
    why = f"the loss curves are {value:.2g} times {scale} apart (limit {CURVE_LIMIT:g}), shifted by {moved:.2g} (limit {SHIFT_LIMIT:g})"
    return GuardCheck(
        "curve",
        value <= CURVE_LIMIT and moved <= SHIFT_LIMIT,
        why,
        max(value, moved * CURVE_LIMIT / SHIFT_LIMIT),
        CURVE_LIMIT,
    )


def smallest_harm(curves: Curves) -> str:
    """Say how much worse the mean loss would have to be for `curves_within_spread` to fail in 95 of 100.

    With the same plain runs. The shift of the curves scatters by its standard error over the seeds (Student's t).
    """
    plain, tuned, unit = _in_windows(curves)
    if len(plain) < 2 or not plain[0] or not unit:
        return "one seed does not show which harm would be found"
    levels = [[sum(curve) / len(curve) for curve in side] for side in (plain, tuned)]
    shifts = estimate([t - p for p, t in zip(*levels, strict=True)], 2 * HARM_POWER - 1)
    harm = SHIFT_LIMIT * _scale(plain)[0] + shifts.half_width
    share = harm / max(abs(sum(levels[0]) / len(plain)), TINY)
    return (
        f"a mean loss higher by {harm * unit:.2g} ({share:.1%}) would be found in {HARM_POWER:.0%} of tries"
    )


def _in_windows(curves: Curves) -> tuple[list[list[float]], list[list[float]], float]:
    """The windows of the plain and of the tuned curves, in units of the largest loss, and that loss."""
    length = common_length(curves)
    plain, tuned = ([side[:length] for side in sides] for sides in zip(*curves, strict=True))
    unit = max((abs(x) for curve in (*plain, *tuned) for x in curve), default=0.0)
    if not unit:
        return plain, tuned, unit
    return [_windows(curve, unit) for curve in plain], [_windows(curve, unit) for curve in tuned], unit


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
