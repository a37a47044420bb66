"""Ratios with intervals. Standard library only: the process of a trial must not load numpy for it.

A comparison is a list of *pairs* (pairs of processes, or one pair if both sides share a process). A pair is a
list of *rounds*. A round has the tick times of both sides, measured next to each other. The bootstrap draws
pairs, then rounds within them, because two processes of one program differ for their whole life.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.schema.records import CONFIDENCE, Ratio

BOOTSTRAP_DRAWS = 800
OUTLIER_FACTOR = 6.0  # longer ticks are not steps but, for example, an evaluation or a checkpoint


@dataclass(frozen=True)
class Round:
    """Milliseconds per tick of side A and of side B, measured in adjacent blocks."""

    a_ms: float
    b_ms: float

    @property
    def log_ratio(self) -> float:
        """Return log(A's time / B's time), which is positive if B is faster."""
        return math.log(self.a_ms / self.b_ms)


def median(values: Sequence[float]) -> float:
    """Return the median. Raises ValueError without values."""
    if not values:
        raise ValueError("the median of nothing")
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quantile(values: Sequence[float], q: float) -> float:
    """Return a quantile by linear interpolation between the closest ranks (Hyndman and Fan's type 7)."""
    if not values:
        raise ValueError("a quantile of nothing")
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def block_ms(ticks_ms: Sequence[float]) -> float:
    """Return the milliseconds per tick of a block, without outliers.

    It is a mean, because loader workers make steps come in bursts. Ticks of many times the median are left
    out (an evaluation, a checkpoint, the end of an epoch).
    """
    middle = median(ticks_ms)
    kept = [t for t in ticks_ms if t <= OUTLIER_FACTOR * middle] or list(ticks_ms)
    return max(sum(kept) / len(kept), 1e-6)


def compare(pairs: Sequence[Sequence[Round]], seed: int = 0) -> Ratio:
    """Return how many times as fast B is as A: the median ratio over pairs, with a bootstrap interval.

    The ratio of a pair is the exponential of the mean log ratio of its rounds. With one pair, the interval
    covers only that process. Raises ValueError if nothing was measured.
    """
    pairs = [list(pair) for pair in pairs if pair]
    if not pairs:
        raise ValueError("nothing was measured on both sides")
    logs = [[r.log_ratio for r in pair] for pair in pairs]
    centre = median([mean(pair) for pair in logs])
    rng = random.Random(seed)
    draws = []
    for _ in range(BOOTSTRAP_DRAWS):
        picked = [logs[rng.randrange(len(logs))] for _ in logs] if len(logs) > 1 else logs
        draws.append(median([mean([pair[rng.randrange(len(pair))] for _ in pair]) for pair in picked]))
    tail = (1 - CONFIDENCE) / 2
    low, high = quantile(draws, tail), quantile(draws, 1 - tail)
    count = len(logs) if len(logs) > 1 else len(logs[0])
    if count < 3:
        # Two rounds do not show their spread: widen by their distance, or by a tenth for a single round.
        flat = [value for pair in logs for value in pair]
        reach = max(flat) - min(flat) if len(flat) > 1 else 0.1
        low, high = min(low, centre - reach), max(high, centre + reach)
    return Ratio(math.exp(centre), math.exp(min(low, centre)), math.exp(max(high, centre)), count)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def two_sample_ks(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the p-value of the two-sample Kolmogorov-Smirnov test.

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
