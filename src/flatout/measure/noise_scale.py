"""Estimate the gradient noise scale.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota team, "An Empirical Model of Large-Batch Training",
2018, appendix A.

Given k gradients g_1 ... g_k at the same weights, each of its own batch of b samples. Let G be their
expectation and Sigma the covariance of the gradient of one sample. Then E|g_i|^2 = |G|^2 + tr(Sigma) / b, and
E(g_i . g_j) = |G|^2 for two different batches. So

    |G|^2      = the mean of g_i . g_j over all pairs i != j
    tr(Sigma)  = b (the mean of |g_i|^2 - |G|^2)

are unbiased. They are the paper's estimates from two batch sizes, b and k b. The noise scale is B = tr(Sigma)
/ |G|^2. It does not change if all gradients are multiplied by one number. So a loss that sums over its batch
gives the same B as a mean, as long as b is constant.

Large models provide sums over groups of batches. Then only products between different groups are used.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.measure.statistics import quantile
from flatout.schema.records import CONFIDENCE

BOOTSTRAP_DRAWS = 500
MIN_GROUPS = 8  # fewer groups give neither the gradient nor its spread


@dataclass(frozen=True)
class NoiseScale:
    """``value``, ``low`` and ``high`` are in units of ``batch``.

    None means unbounded: the gradient is not significant against its noise.
    """

    value: float | None
    low: float
    high: float | None
    gradient: float  # |G|^2, an estimate that may be negative
    trace: float  # tr(Sigma)


def noise_scale(
    products: Sequence[Sequence[float]],
    squares: Sequence[float],
    batch: float,
    draws: int = BOOTSTRAP_DRAWS,
) -> NoiseScale:
    """Estimate the noise scale with its interval.

    ``products[a][b]`` is the mean gradient of group a times that of group b. ``squares[a]`` is the mean of
    |g|^2 over the batches of group a. The interval is a bootstrap over groups; a group drawn twice is not
    paired with itself. Raises ValueError for fewer than MIN_GROUPS groups.
    """
    count = len(squares)
    if count < MIN_GROUPS:
        raise ValueError(f"{count} groups of gradients; at least {MIN_GROUPS} are required")
    gradient, mean_square = _moments(products, squares, [1] * count)
    rng = random.Random(0)
    scales = []
    for _ in range(draws):
        weights = [0] * count
        for _ in range(count):
            weights[rng.randrange(count)] += 1
        scales.append(_scale(*_moments(products, squares, weights), batch))
    scales.sort()
    tail = (1 - CONFIDENCE) / 2
    low, high = _quantile(scales, tail), _quantile(scales, 1 - tail)
    value = _scale(gradient, mean_square, batch)
    return NoiseScale(
        value if math.isfinite(value) else None,
        min(low, value),
        max(high, value) if math.isfinite(max(high, value)) else None,
        gradient,
        batch * (mean_square - gradient),
    )


def _moments(
    products: Sequence[Sequence[float]], squares: Sequence[float], weights: Sequence[int]
) -> tuple[float, float]:
    """Return |G|^2 and the mean of |g|^2, each group weighted by ``weights``."""
    weighted = [(index, n) for index, n in enumerate(weights) if n]
    numerator = denominator = 0.0
    for position, (a, n) in enumerate(weighted):
        row = products[a]
        for b, m in weighted[position + 1 :]:
            numerator += n * m * row[b]
            denominator += n * m
    mean_square = sum(n * squares[a] for a, n in weighted) / sum(weights)
    return numerator / denominator if denominator else 0.0, mean_square


def _scale(gradient: float, mean_square: float, batch: float) -> float:
    trace = max(0.0, batch * (mean_square - gradient))
    return trace / gradient if gradient > 0 else math.inf


def _quantile(ordered: Sequence[float], q: float) -> float:
    """A quantile of sorted values, the last of which may be infinite."""
    finite = [value for value in ordered if math.isfinite(value)]
    if len(finite) == len(ordered):
        return quantile(ordered, q)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]
