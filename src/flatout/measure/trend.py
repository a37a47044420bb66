"""Detect growth of a series: the Mann-Kendall test, and Theil and Sen's slope.

Neither depends on outliers or on the shape of the noise. Sources: Mann, Econometrica 13 (1945); Kendall, Rank
Correlation Methods (1975), with the correction for ties; Sen, JASA 63 (1968).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from flatout.measure.statistics import median


def growth_p_value(series: Sequence[float]) -> float:
    """Return the one-sided probability of such a rise in a series without a trend.

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
    """Return the median slope between all pairs, per step of the series. 0.0 for fewer than two values."""
    slopes = [(b - a) / (j - i) for i, a in enumerate(series) for j, b in enumerate(series) if j > i]
    return median(slopes) if slopes else 0.0


def keeps_growing(series: Sequence[float], significance: float) -> bool:
    """Return whether a rise is significant and continues. A warm-up also rises, but then stays flat."""
    half = len(series) // 2
    rise = slope(series)
    return rise > 0 and growth_p_value(series) < significance and slope(series[half:]) > rise / 3


def grows_evenly(series: Sequence[float], min_step: float) -> bool:
    """Return whether each step adds about the same, and at least ``min_step``. A few steps show this already."""
    added = [b - a for a, b in pairwise(series)]
    return len(added) >= 4 and min(added) >= min_step and max(added) <= 1.5 * min(added)
