"""Statistics of measurements. Standard library only: the process of a trial must not load numpy for it.

A comparison is a list of *pairs* (pairs of processes, or one pair if both sides share a process). A pair is a
list of *rounds*. A round has the tick times of both sides, measured next to each other. Two processes of one
program differ for their whole life, so the values of an interval are pairs; with one pair, its rounds.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from flatout.schema.records import CONFIDENCE, Ratio

# Two values do not show their spread. So each interval of a ratio also counts a usual one: the spread of the log
# ratios of pairs and of rounds on shared machines (3 to 7 %), with the weight of this many values.
USUAL_SPREAD, USUAL_SPREAD_VALUES = 0.05, 2
OUTLIER_FACTOR = 6.0  # longer ticks are not steps but, for example, an evaluation or a checkpoint


@dataclass(frozen=True)
class Round:
    """Milliseconds per tick of side A and of side B, measured in adjacent blocks."""

    a_ms: float
    b_ms: float

    @property
    def log_ratio(self) -> float:
        """Log(A's time / B's time), which is positive if B is faster."""
        return math.log(self.a_ms / self.b_ms)


def median(values: Sequence[float]) -> float:
    """The median. Raises ValueError without values."""
    if not values:
        raise ValueError("the median of nothing")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values: Sequence[float], q: float) -> float:
    """A quantile by linear interpolation between the closest ranks (Hyndman and Fan's type 7)."""
    if not values:
        raise ValueError("a quantile of nothing")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def block_ms(ticks_ms: Sequence[float]) -> float:
    """The milliseconds per tick of a block, without outliers.

    It is a mean, because loader workers make steps come in bursts. Ticks of many times the median are left
    out (an evaluation, a checkpoint, the end of an epoch).
    """
    middle = median(ticks_ms)
    kept = [t for t in ticks_ms if t <= OUTLIER_FACTOR * middle] or list(ticks_ms)
    return max(sum(kept) / len(kept), 1e-6)


def compare(pairs: Sequence[Sequence[Round]]) -> Ratio:
    """How many times as fast B is as A: the geometric mean of the ratios of pairs, with Student's interval.

    The ratio of a pair is that of its rounds. With one pair, the values are its rounds, and the interval covers
    only that process. The variance is pooled with a usual one (Smyth, Stat. Appl. Genet. Mol. Biol. 3, 2004).
    Raises ValueError if nothing was measured.
    """
    logs = [[r.log_ratio for r in pair] for pair in pairs if pair]
    if not logs:
        raise ValueError("nothing was measured on both sides")
    values = [mean(pair) for pair in logs] if len(logs) > 1 else logs[0]
    centre, n = mean(values), len(values)
    degrees = USUAL_SPREAD_VALUES + n - 1
    squares = USUAL_SPREAD_VALUES * USUAL_SPREAD**2 + math.fsum((v - centre) ** 2 for v in values)
    half_width = t_quantile((1 + CONFIDENCE) / 2, degrees) * math.sqrt(squares / degrees / n)
    return Ratio(math.exp(centre), math.exp(centre - half_width), math.exp(centre + half_width), n)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def two_sample_ks(a: Sequence[float], b: Sequence[float]) -> float:
    """The p-value of the two-sample Kolmogorov-Smirnov test.

    It is asymptotic (Numerical Recipes, section 14.3).
    """
    if not a or not b:
        return 1.0
    left, right = sorted(a), sorted(b)
    i = j = 0
    gap = 0.0
    while i < len(left) and j < len(right):
        value = min(left[i], right[j])
        while i < len(left) and left[i] <= value:
            i += 1
        while j < len(right) and right[j] <= value:
            j += 1
        gap = max(gap, abs(i / len(left) - j / len(right)))
    size = math.sqrt(len(left) * len(right) / (len(left) + len(right)))
    x = (size + 0.12 + 0.11 / size) * gap
    if x < 0.2:
        return 1.0
    terms = (2.0 * (1 if k % 2 else -1) * math.exp(-2 * k * k * x * x) for k in range(1, 101))
    return min(1.0, max(0.0, sum(terms)))


# -- Student's t: intervals of a mean from few values


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval. ``half_width`` is half the width of the interval, infinite with one value."""

    mean: float
    half_width: float
    n: int

    @property
    def low(self) -> float:
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        return self.mean + self.half_width


def estimate(values: Sequence[float], level: float) -> Estimate:
    """The mean of independent values with its interval. Raises ValueError without values."""
    if not values:
        raise ValueError("nothing was measured")
    centre, n = mean(values), len(values)
    if n == 1:
        return Estimate(centre, math.inf, 1)
    variance = math.fsum((v - centre) ** 2 for v in values) / (n - 1)
    return Estimate(centre, t_quantile((1 + level) / 2, n - 1) * math.sqrt(variance / n), n)


def difference(a: Sequence[float], b: Sequence[float], level: float) -> Estimate:
    """Return mean(b) - mean(a) of two independent groups.

    Source: Welch, Biometrika 34, 1947. Raises ValueError with fewer than two values on a side.
    """
    if min(len(a), len(b)) < 2:
        raise ValueError("a difference of groups needs two values of each")
    centres = [mean(side) for side in (a, b)]
    squared_errors = [
        math.fsum((v - centre) ** 2 for v in side) / (len(side) - 1) / len(side)
        for side, centre in zip((a, b), centres, strict=True)
    ]
    weighted = sum(
        squared_error**2 / (len(side) - 1) for squared_error, side in zip(squared_errors, (a, b), strict=True)
    )
    degrees = max(1, int(sum(squared_errors) ** 2 / weighted)) if weighted else len(a) + len(b) - 2
    half_width = t_quantile((1 + level) / 2, degrees) * math.sqrt(sum(squared_errors))
    return Estimate(centres[1] - centres[0], half_width, min(len(a), len(b)))


@cache
def t_quantile(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for ``probability`` of at least 0.5."""
    low, high = 0.0, 2.0
    while _cdf(high, degrees) < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _cdf(middle, degrees) < probability else (low, middle)
    return high


def _cdf(t: float, degrees: int) -> float:
    """The distribution function. Source: Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan2(t, math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for k in range(3, degrees - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        inside = 2 / math.pi * (angle + sine * total)
    else:
        term = total = 1.0
        for k in range(2, degrees - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        inside = sine * total
    return 0.5 + inside / 2


# -- growth of a series
# The Mann-Kendall test, and Theil and Sen's slope depend neither on outliers nor on the shape of the noise.
# Sources: Mann, Econometrica 13 (1945); Kendall, Rank Correlation Methods (1975), with the correction for
# ties; Sen, JASA 63 (1968).


def growth_p_value(series: Sequence[float]) -> float:
    """The one-sided probability of such a rise in a series without a trend.

    The result is 1.0 if there are too few values.
    """
    n = len(series)
    if n < 4:
        return 1.0
    score = sum((b > a) - (b < a) for i, a in enumerate(series) for b in series[i + 1 :])
    ties = sum(count * (count - 1) * (2 * count + 5) for count in Counter(series).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0:
        return 1.0
    z = (score - (1 if score > 0 else -1 if score < 0 else 0)) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


def slope(series: Sequence[float]) -> float:
    """The median slope between all pairs, per step of the series. 0.0 for fewer than two values."""
    slopes = [(b - a) / (j - i) for i, a in enumerate(series) for j, b in enumerate(series) if j > i]
    return median(slopes) if slopes else 0.0


def keeps_growing(series: Sequence[float], significance: float) -> bool:
    """Whether a rise is significant and continues. A warm-up also rises, but then stays flat."""
    half = len(series) // 2
    rise = slope(series)
    return rise > 0 and growth_p_value(series) < significance and slope(series[half:]) > rise / 3


def grows_evenly(series: Sequence[float], min_step: float) -> bool:
    """Whether each step adds about the same, and at least ``min_step``. A few steps show this already."""
    added = [b - a for a, b in pairwise(series)]
    return len(added) >= 4 and min(added) >= min_step and max(added) <= 1.5 * min(added)
