"""Analyse a learning-rate range test.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.

The learning rate grows by a constant factor per step. Losses of single batches are noisy, so they are
smoothed by an exponential mean (corrected for its start), and slopes are taken over SLOPE_STEPS steps. Only the
fall counts: noise of the steps before it may be steeper.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from flatout.schema.batch import LrPoint

SMOOTHING = 0.9  # weight of the previous mean at each step
SLOPE_STEPS = 10  # steps for a slope
DIVERGENCE_FACTOR = 1.5  # the loss diverges at this multiple of the first losses
MIN_RELATIVE_FALL = 0.02  # a smaller relative fall of the loss counts as noise
BEGUN = 0.25  # share of the fall after which it has begun


def smoothed(losses: Sequence[float | None]) -> list[float | None]:
    """The smoothed losses. They are None from the first loss that is not finite."""
    mean, weight, means = 0.0, 0.0, list[float | None]()
    for loss in losses:
        if loss is None or not math.isfinite(loss):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        means.append(mean / weight)
    return [*means, *[None] * (len(losses) - len(means))]


def find_rates(points: Sequence[LrPoint]) -> tuple[float | None, float | None, float | None]:
    """The learning rates at which the smoothed loss falls fastest, is lowest, and diverges.

    None if there is no such rate.
    """
    usable = [(point.lr, point.smooth) for point in points if point.smooth is not None and point.lr > 0]
    first_non_finite = points[len(usable)].lr if len(usable) < len(points) else None
    if len(usable) <= SLOPE_STEPS:
        return None, None, first_non_finite
    losses = [loss for _, loss in usable]
    start = losses[SLOPE_STEPS - 1]  # means of fewer steps are noise
    lowest_index = min(range(SLOPE_STEPS - 1, len(losses)), key=losses.__getitem__)
    lowest = losses[lowest_index]
    divergence_loss = lowest + (DIVERGENCE_FACTOR - 1) * max(abs(start), start - lowest)
    diverged = next((lr for lr, loss in usable[lowest_index:] if loss > divergence_loss), first_non_finite)
    raw = [point.loss or 0.0 for point in points[: len(usable)]]
    noise = median(abs(after - before) for before, after in pairwise(raw))
    if start - lowest < max(MIN_RELATIVE_FALL * max(abs(start), 1e-12), noise):
        return None, None, diverged
    begun = max(i for i in range(lowest_index) if losses[i] >= start - BEGUN * (start - lowest))
    ends = range(max(begun + SLOPE_STEPS // 2, SLOPE_STEPS), lowest_index + 1) or [lowest_index]
    steepest = max(ends, key=lambda end: losses[end - SLOPE_STEPS] - losses[end]) - SLOPE_STEPS // 2
    return usable[steepest][0], usable[lowest_index][0], diverged


def suggest(steepest: float | None, lowest: float | None, diverged: float | None) -> tuple[float | None, str]:
    """An initial learning rate, and the reason.

    The lowest loss is at the edge of stability, so at most a third of that rate is suggested.
    """
    if steepest is None or lowest is None:
        if diverged is not None:
            return None, "the loss does not fall before it diverges: start at a smaller learning rate (--low)"
        return None, "the loss does not fall anywhere in this range: widen it (--low, --high)"
    if steepest > lowest / 3:
        return lowest / 3, (
            f"a third of {lowest:.2g}, where the loss is lowest; it falls fastest at {steepest:.2g}, too close to that edge"
        )
    diverges = f" and diverges at {diverged:.2g}" if diverged else ""
    return steepest, f"there the loss falls fastest; it is lowest at {lowest:.2g}{diverges}"
