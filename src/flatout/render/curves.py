"""Loss curves thinned for plots, and remarks about them.

Both sides are thinned at the same positions by averaging runs of adjacent values, so equal curves stay equal.
A value that is not finite makes a gap and is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from flatout.render.formatting import count, drawable, figure
from flatout.schema.session import GuardRecord

MAX_POINTS = 240

Curve = list[float | None]


@dataclass(frozen=True)
class LossCurves:
    """Thinned curves of the plain and the tuned losses.

    ``at`` is the position of each point. ``low`` and ``high`` bound the plain curves of all seeds.
    ``every`` losses make one point.
    """

    at: list[float]
    plain: Curve
    tuned: Curve
    low: Curve
    high: Curve
    every: int
    total: int
    seeds: int

    @property
    def drawn(self) -> list[float]:
        return [v for curve in (self.plain, self.tuned, self.low, self.high) for v in curve if v is not None]


def loss_curves(
    plain_losses: Sequence[Sequence[float]], tuned_losses: Sequence[Sequence[float]]
) -> LossCurves | None:
    """Return the thinned curves of one curve per seed, or None without finite values."""
    plain = [[drawable(v) for v in curve] for curve in plain_losses if curve]
    tuned = [[drawable(v) for v in curve] for curve in tuned_losses if curve]
    total = max((len(curve) for curve in plain[:1] + tuned[:1]), default=0)
    every = max(1, -(-total // MAX_POINTS))
    thin_plain = [_thin(curve[:total], every) for curve in plain]
    thin_tuned = [_thin(curve[:total], every) for curve in tuned[:1]]
    columns = (
        [[v for v in column if v is not None] for column in zip_longest(*thin_plain)]
        if len(plain) > 1
        else []
    )
    points = -(-total // every)
    curves = LossCurves(
        at=[min(total, i * every + (every + 1) / 2) for i in range(points)],
        plain=_padded(thin_plain[:1], points),
        tuned=_padded(thin_tuned, points),
        low=_padded([[min(c, default=None) for c in columns]], points),
        high=_padded([[max(c, default=None) for c in columns]], points),
        every=every,
        total=total,
        seeds=len(plain),
    )
    return curves if curves.drawn else None


def _thin(curve: Curve, every: int) -> Curve:
    runs = (curve[i : i + every] for i in range(0, len(curve), every))
    return [sum(seen) / len(seen) if (seen := [v for v in run if v is not None]) else None for run in runs]


def _padded(curves: Sequence[Curve], points: int) -> Curve:
    curve = curves[0] if curves else []
    return [*curve[:points], *[None] * (points - len(curve))]


def remarks(guard: GuardRecord, curves: LossCurves) -> list[str]:
    """Return caveats about the chart."""
    said = []
    if curves.every > 1:
        said.append(
            f"Each point is the mean of {count(curves.every)} losses; {count(curves.total)} were compared."
        )
    pairs = [
        (a, b) for a, b in zip(curves.plain, curves.tuned, strict=True) if a is not None and b is not None
    ]
    if pairs:
        apart = max(abs(a - b) for a, b in pairs)
        said.append(
            "The two lines coincide everywhere."
            if apart == 0
            else f"The two lines are at most {figure(apart, 2)} apart."
        )
    widths = [
        high - low
        for low, high in zip(curves.low, curves.high, strict=True)
        if low is not None and high is not None
    ]
    if widths:
        said.append(
            f"The band of the {curves.seeds} seeds has a median width of {figure(sorted(widths)[len(widths) // 2], 2)}."
        )
    for name, losses in (("plain", guard.plain_losses), ("tuned", guard.tuned_losses)):
        if losses and (lost := sum(drawable(v) is None for v in losses[0])):
            first = next(i for i, v in enumerate(losses[0], 1) if drawable(v) is None)
            said.append(
                f"{count(lost)} of the {name} losses are not finite and not shown; the first is at position {count(first)}."
            )
        elif not losses:
            said.append(f"There is no {name} curve.")
    return said
