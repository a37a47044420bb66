"""Charts of a profile: phases of a step, roofline, memory over a step, memory over all steps.

Pure functions from a record to inline SVG, as in charts.py. Colour is never the only signal: every area and
every dot has a label or a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flatout.render.charts import LETTER, NARROW, PLOT_HEIGHT, WIDE, forest_axis, forest_row
from flatout.render.formatting import drawable, interval, is_positive, milliseconds, times
from flatout.render.svg import (
    Scale,
    across,
    axis_below,
    axis_beside,
    chart,
    decades,
    element,
    line_through,
    percent,
    powers,
    ratio_scale,
    stretched,
    title,
    upright,
)
from flatout.schema.profile import Operation, ProfileRecord, WhatIf
from flatout.schema.records import PHASES

LARGEST_DOT, SMALLEST_DOT = 13.0, 3.5
MOST_DOTS = 24


def phase_bar(profile: ProfileRecord) -> Markup | None:
    """Return the step as one stacked bar of phases, by share."""
    phases = [
        (name, time) for name, time in profile.phases.items() if drawable(time.share) and time.share > 0
    ]
    total = sum(time.share for _, time in phases)
    if not phases or total <= 0:
        return None
    place, shapes = 0.0, []
    for name, time in phases:
        width = time.share / total
        kind = f"phase-{name}" if name in PHASES else "phase-other"
        share = f"{width:.0%}".replace("%", " %")
        shapes.append(
            element(
                "rect",
                title(f"{name}: {milliseconds(time.median_ms)}, {share} of the step"),
                x=percent(place),
                y=0,
                width=percent(width),
                height=40,
                class_=f"phase {kind}",
            )
        )
        for screen, pixels, texts in (("narrow", NARROW, (name,)), ("wide", WIDE, (f"{name} {share}", name))):
            fitting = next((text for text in texts if len(text) * LETTER + 8 <= width * pixels), None)
            if fitting:
                shapes.append(
                    element(
                        "text",
                        fitting,
                        x=percent(place + width / 2),
                        y=25,
                        text_anchor="middle",
                        class_=f"label on-phase on-{kind} {screen}-only",
                    )
                )
        place += width
    return chart(
        "Phases of a step: " + ", ".join(f"{name} {milliseconds(time.median_ms)}" for name, time in phases),
        44,
        shapes,
    )


@dataclass(frozen=True)
class WhatIfLine:
    name: str
    row: Markup
    ratio: str
    interval: str


def what_if_lines(what_ifs: Sequence[WhatIf]) -> tuple[list[WhatIfLine], Markup] | None:
    """Return a row per measured what-if, and the axis below. A full dot marks a certain gain."""
    drawn = [
        (w.name, w.ratio)
        for w in what_ifs
        if w.ratio is not None
        and is_positive(w.ratio.median)
        and is_positive(w.ratio.low)
        and is_positive(w.ratio.high)
    ]
    if not drawn:
        return None
    scale = ratio_scale([value for _, ratio in drawn for value in (ratio.median, ratio.low, ratio.high)])
    lines = [
        WhatIfLine(
            name,
            forest_row(scale, name, ratio.median, ratio.low, ratio.high, ratio.certain, None),
            times(ratio.median),
            interval(ratio.low, ratio.high),
        )
        for name, ratio in sorted(drawn, key=lambda each: -each[1].median)
    ]
    return lines, forest_axis(scale)


def roofline(profile: ProfileRecord) -> tuple[Markup, Markup, Markup, list[Operation]] | None:
    """Return the axis of speed, the plot, the axis of intensity, and the operations shown, largest first.

    The horizontal axis is FLOPs per byte, the vertical axis achieved FLOP/s. The roof is the measured memory
    bandwidth, then the measured peak of matrix products.
    """
    dots = sorted(
        (o for o in profile.operations if _intensity(o) is not None and _speed(o) is not None),
        key=lambda o: -o.share,
    )[:MOST_DOTS]
    bandwidth = drawable(profile.ceilings.get("memory_bytes_per_s"))
    peak = max(
        (
            value
            for name, v in profile.ceilings.items()
            if name.startswith("matmul_") and (value := drawable(v))
        ),
        default=None,
    )
    if not dots:
        return None
    at = [(_intensity(o) or 1.0, _speed(o) or 1.0) for o in dots]
    xs, ys = [x for x, _ in at], [y for _, y in at]
    if bandwidth and peak:
        xs, ys = [*xs, peak / bandwidth * 3], [*ys, peak * 1.4]
    x, y = decades(xs), decades(ys)
    shapes = [*(upright(x, t) for t in powers(x)), *(across(y, t) for t in powers(y))]
    if bandwidth and peak:
        shapes.append(stretched([element("path", d=_roof(x, y, bandwidth, peak), class_="roof")]))
    shapes += [_dot(o, x(i), 1 - y(s)) for o, (i, s) in reversed(list(zip(dots, at, strict=True)))]
    shapes += [
        element(
            "text",
            str(n + 1),
            x=percent(x(i)),
            y=percent(1 - y(s)),
            dx=_radius(o) + 3,
            dy="0.32em",
            class_="label soft",
        )
        for n, (o, (i, s)) in enumerate(list(zip(dots, at, strict=True))[:6])
    ]
    label = f"Roofline: {len(dots)} operations by FLOPs a byte and FLOPs a second"
    return (
        axis_beside(y, [(t, _flops(t)) for t in powers(y)], PLOT_HEIGHT),
        chart(label, PLOT_HEIGHT, shapes, "chart plot"),
        axis_below(x, [(t, f"{t:g}") for t in powers(x)]),
        dots,
    )


def reached(operation: Operation) -> str:
    """Return the end of a phrase: the share of the possible speed; empty if it is unknown."""
    return (
        f", {100 * operation.roofline:.0f} % of the possible speed" if operation.roofline is not None else ""
    )


def _dot(operation: Operation, x: float, y: float) -> Markup:
    said = f"{operation.name}: {100 * operation.share:.0f} % of the time, {_flops(_speed(operation) or 0)}{reached(operation)}"
    kind = operation.limit if operation.limit in ("compute", "memory", "launch") else "unknown"
    return element(
        "circle", title(said), cx=percent(x), cy=percent(y), r=_radius(operation), class_=f"dot dot-{kind}"
    )


def _radius(operation: Operation) -> float:
    return max(SMALLEST_DOT, LARGEST_DOT * math.sqrt(min(1.0, max(0.0, operation.share))))


def _intensity(operation: Operation) -> float | None:
    flops, moved = drawable(operation.flops), drawable(operation.moved_bytes)
    return flops / moved if flops and moved and flops > 0 and moved > 0 else None


def _speed(operation: Operation) -> float | None:
    """Return the achieved FLOP/s."""
    ms = drawable(operation.device_ms if operation.device_ms is not None else operation.host_ms)
    flops = drawable(operation.flops)
    return flops / ms * 1000 if flops and ms and ms > 0 and flops > 0 else None


def _roof(x: Scale, y: Scale, bandwidth: float, peak: float) -> str:
    corners = [max(x.low, y.low / bandwidth), peak / bandwidth, x.high]
    points = [(i, min(peak, bandwidth * i)) for i in sorted(c for c in corners if x.low <= c <= x.high)]
    return line_through(points, x, y)


def _flops(value: float) -> str:
    for power, name in ((12, "TFLOP/s"), (9, "GFLOP/s"), (6, "MFLOP/s"), (3, "kFLOP/s")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {name}"
    return f"{value:.3g} FLOP/s"
