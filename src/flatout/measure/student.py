"""Student's t: intervals of a mean from few values. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from flatout.measure.statistics import mean


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
    """Return the mean of independent values with its interval. Raises ValueError without values."""
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
    """Return the quantile of Student's t distribution, for ``probability`` of at least 0.5."""
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
