"""Analyse a learning-rate range test.

Source: Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3.

The learning rate grows by a constant factor per step. Losses of single batches are noisy, so they are
smoothed by an exponential mean (corrected for its start). Slopes over log(learning rate) come from a line
through SPAN adjacent points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.schema.lr_range import LrPoint

SMOOTHING = 0.9  # weight of the previous mean at each step
SPAN = 11  # points for a slope
GONE = 1.5  # the loss diverges at this multiple of the first losses
LEAST_FALL = 0.02  # a smaller relative fall of the loss counts as noise


def smoothed(losses: Sequence[float | None]) -> list[float | None]:
    """Return the smoothed losses. They are None from the first loss that is not finite."""
    mean, weight, found = 0.0, 0.0, list[float | None]()
    for loss in losses:
        if loss is None or not math.isfinite(loss):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        found.append(mean / weight)
    return [*found, *[None] * (len(losses) - len(found))]


def read(points: Sequence[LrPoint]) -> tuple[float | None, float | None, float | None]:
    """Return the learning rates at which the smoothed loss falls fastest, is lowest, and diverges.

    None if there is no such rate.
    """
    usable = [(point.lr, point.smooth) for point in points if point.smooth is not None and point.lr > 0]
    if len(usable) < SPAN:
        return None, None, points[len(usable)].lr if len(usable) < len(points) else None
    start = min(smooth for _, smooth in usable[:SPAN])
    low_at = min(range(len(usable)), key=lambda at: usable[at][1])
    lowest = usable[low_at]
    gone = next(
        (
            lr
            for lr, smooth in usable[low_at:]
            if smooth > lowest[1] + (GONE - 1) * max(abs(start), start - lowest[1])
        ),
        None,
    )
    if gone is None and len(usable) < len(points):
        gone = points[len(usable)].lr
    if start - lowest[1] < LEAST_FALL * max(abs(start), 1e-12):
        return None, None, gone
    steepest = min(range(low_at + 1), key=lambda at: _slope(usable, at))
    return usable[steepest][0], lowest[0], gone


def _slope(usable: Sequence[tuple[float, float]], at: int) -> float:
    """Return the slope of the loss over log(lr), by least squares through the adjacent points."""
    low = max(0, min(at - SPAN // 2, len(usable) - SPAN))
    near = [(math.log(lr), smooth) for lr, smooth in usable[low : low + SPAN]]
    x, y = sum(a for a, _ in near) / len(near), sum(b for _, b in near) / len(near)
    spread = sum((a - x) ** 2 for a, _ in near)
    return sum((a - x) * (b - y) for a, b in near) / spread if spread > 0 else 0.0


def suggest(steepest: float | None, lowest: float | None, diverged: float | None) -> tuple[float | None, str]:
    """Return an initial learning rate, and the reason.

    The lowest loss is at the edge of stability, so at most a third of that rate is suggested.
    """
    if steepest is None or lowest is None:
        return None, (
            "the loss does not fall anywhere in this range: widen it (--low, --high), unless the program does not learn from these steps"
            if diverged is None
            else "the loss does not fall before it diverges: start at a smaller learning rate (--low)"
        )
    edge = lowest / 3
    if steepest <= edge:
        return steepest, f"there the loss falls fastest; it is lowest at {lowest:.2g}" + (
            f" and diverges at {diverged:.2g}" if diverged else ""
        )
    return (
        edge,
        f"a third of {lowest:.2g}, where the loss is lowest; it falls fastest at {steepest:.2g}, too close to that edge",
    )
