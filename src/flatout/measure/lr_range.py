"""Reading a learning-rate range test (Smith, "Cyclical Learning Rates for Training Neural Networks", WACV 2017, section 3.3).

The learning rate grows by a constant factor from step to step. Losses of single batches are noise, so they are smoothed by an exponential mean
(corrected for its start), and slopes are taken over log(learning rate) by a straight line through SPAN neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.plan.lr_range import LrPoint

SMOOTHING = 0.9  # of the last mean that is kept at each step
SPAN = 11  # points of a slope
GONE = 1.5  # times the first losses: it does not come back from there
LEAST_FALL = 0.02  # of the loss; less is not told from noise


def smoothed(losses: Sequence[float | None]) -> list[float | None]:
    """None from the first loss that is not finite on."""
    mean, weight, found = 0.0, 0.0, list[float | None]()
    for loss in losses:
        if loss is None or not math.isfinite(loss):
            break
        mean = SMOOTHING * mean + (1 - SMOOTHING) * loss
        weight = SMOOTHING * weight + (1 - SMOOTHING)
        found.append(mean / weight)
    return [*found, *[None] * (len(losses) - len(found))]


def read(points: Sequence[LrPoint]) -> tuple[float | None, float | None, float | None]:
    """Learning rates: where the smoothed loss falls fastest, where it is lowest, where it has left for good. None where there is no such place."""
    usable = [(point.lr, point.smooth) for point in points if point.smooth is not None and point.lr > 0]
    if len(usable) < SPAN:
        return None, None, points[len(usable)].lr if len(usable) < len(points) else None
    start = min(smooth for _, smooth in usable[:SPAN])
    low_at = min(range(len(usable)), key=lambda at: usable[at][1])
    lowest = usable[low_at]
    gone = next((lr for lr, smooth in usable[low_at:] if smooth > lowest[1] + (GONE - 1) * max(abs(start), start - lowest[1])), None)
    if gone is None and len(usable) < len(points):
        gone = points[len(usable)].lr
    if start - lowest[1] < LEAST_FALL * max(abs(start), 1e-12):
        return None, None, gone
    steepest = min(range(low_at + 1), key=lambda at: _slope(usable, at))
    return usable[steepest][0], lowest[0], gone


def _slope(usable: Sequence[tuple[float, float]], at: int) -> float:
    """Of the loss over log(lr), least squares through the neighbours."""
    low = max(0, min(at - SPAN // 2, len(usable) - SPAN))
    near = [(math.log(lr), smooth) for lr, smooth in usable[low:low + SPAN]]
    x, y = sum(a for a, _ in near) / len(near), sum(b for _, b in near) / len(near)
    spread = sum((a - x) ** 2 for a, _ in near)
    return sum((a - x) * (b - y) for a, b in near) / spread if spread > 0 else 0.0


def suggest(steepest: float | None, lowest: float | None, diverged: float | None) -> tuple[float | None, str]:
    """A learning rate to begin with, and why. The lowest loss stands at the edge of what is stable, so a third of it is the most that is suggested."""
    if steepest is None or lowest is None:
        return None, ("the loss does not fall anywhere in this range: widen it (--low, --high), or the program does not learn from these steps"
                      if diverged is None else "the loss does not fall before it diverges: begin at a smaller learning rate (--low)")
    edge = lowest / 3
    if steepest <= edge:
        return steepest, f"there the loss falls fastest; it is lowest at {lowest:.2g}" + (f" and leaves for good at {diverged:.2g}" if diverged else "")
    return edge, f"a third of {lowest:.2g}, where the loss is lowest; it falls fastest at {steepest:.2g}, too near to that edge"
