"""Charts of a profile: phases of a step, roofline, memory over a step, memory over all steps.

Pure functions from a record to inline SVG, as in charts.py. Colour is never the only signal: every area and
every dot has a label or a tooltip.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flatout.plan.profile import MEMORY_KINDS, MemoryGrowth, MemorySeen, Operation, ProfileRecord, WhatIf
from flatout.plan.records import PHASES
from flatout.render.charts import LETTER, NARROW, PLOT_HEIGHT, WIDE, forest_axis, forest_row
from flatout.render.formatting import drawable, figure, interval, milliseconds, size, times
from flatout.render.svg import (
    UNITS,
    Scale,
    axis_below,
    chart,
    decades,
    element,
    percent,
    powers,
    ratio_scale,
    round_ticks,
    stretched,
    title,
)

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
        and _positive(w.ratio.median)
        and _positive(w.ratio.low)
        and _positive(w.ratio.high)
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
    shapes = [
        element("line", x1=percent(x(t)), x2=percent(x(t)), y1="0%", y2="100%", class_="grid")
        for t in powers(x)
    ]
    shapes += [
        element("line", x1="0%", x2="100%", y1=percent(1 - y(t)), y2=percent(1 - y(t)), class_="grid")
        for t in powers(y)
    ]
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
    names = [_flops(t) for t in powers(y)]
    texts = [
        element(
            "text", name, x="100%", y=percent(1 - y(t)), dy="0.32em", text_anchor="end", class_="label soft"
        )
        for name, t in zip(names, powers(y), strict=True)
    ]
    left = element(
        "svg",
        *texts,
        aria_hidden="true",
        class_="chart levels",
        width=12 + round(7.5 * max(map(len, names), default=1)),
        height=PLOT_HEIGHT,
    )
    return (
        left,
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
    return "M" + " L".join(f"{UNITS * x(i):.1f} {UNITS * (1 - y(s)):.1f}" for i, s in points)


def _flops(value: float) -> str:
    for power, name in ((12, "TFLOP/s"), (9, "GFLOP/s"), (6, "MFLOP/s"), (3, "kFLOP/s")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {name}"
    return f"{value:.3g} FLOP/s"


def kind_class(kind: str) -> str:
    return f"kind-{MEMORY_KINDS.index(kind)}" if kind in MEMORY_KINDS else "kind-6"


def memory_areas(memory: MemorySeen) -> tuple[Markup, Markup, Markup, list[str]] | None:
    """Return the axis of bytes, the stacked areas over a step, the time axis, and the kinds bottom-up."""
    line = [at for at in memory.timeline if drawable(at.ms) is not None]
    kinds = [kind for kind in MEMORY_KINDS if any(at.kinds.get(kind, 0) > 0 for at in line)]
    if len(line) < 2 or not kinds:
        return None
    totals = [sum(max(0, at.kinds.get(kind, 0)) for kind in kinds) for at in line]
    x, y = Scale(line[0].ms, line[-1].ms), Scale(0.0, max(totals) * 1.05)
    below, areas = [0.0] * len(line), []
    for kind in kinds:
        above = [base + max(0, at.kinds.get(kind, 0)) for base, at in zip(below, line, strict=True)]
        there = [_point(x(at.ms), y(value)) for at, value in zip(line, above, strict=True)]
        back = [_point(x(at.ms), y(value)) for at, value in reversed(list(zip(line, below, strict=True)))]
        areas.append(
            element(
                "path",
                title(f"{kind}: at most {size(max(at.kinds.get(kind, 0) for at in line))}"),
                d="M" + " L".join([*there, *back]) + " Z",
                class_=f"area {kind_class(kind)}",
            )
        )
        below = above
    left, grid = byte_levels(y, PLOT_HEIGHT)
    plot = chart(
        f"Memory over a step: at most {size(max(totals))}",
        PLOT_HEIGHT,
        [stretched(areas), *grid],
        "chart plot",
    )
    return left, plot, axis_below(x, [(t, f"{figure(t)} ms") for t in round_ticks(x.low, x.high, 4)]), kinds


def byte_levels(y: Scale, height: int) -> tuple[Markup, list[Markup]]:
    unit = next((power for power in (3, 2, 1) if y.high >= 1024**power), 0)
    levels = [
        tick * 1024**unit
        for tick in round_ticks(y.low / 1024**unit, y.high / 1024**unit, height // 75)
        if 0.03 < y(tick * 1024**unit) < 0.97
    ]
    names = [size(level) for level in levels]
    texts = [
        element(
            "text", n, x="100%", y=percent(1 - y(at)), dy="0.32em", text_anchor="end", class_="label soft"
        )
        for n, at in zip(names, levels, strict=True)
    ]
    left = element(
        "svg",
        *texts,
        aria_hidden="true",
        class_="chart levels",
        width=12 + round(7.5 * max(map(len, names), default=1)),
        height=height,
    )
    return left, [
        element("line", x1="0%", x2="100%", y1=percent(1 - y(at)), y2=percent(1 - y(at)), class_="grid over")
        for at in levels
    ]


def peak_bar(memory: MemorySeen) -> Markup | None:
    """Return the contents of the peak as one stacked bar."""
    parts = [(kind, amount) for kind, amount in memory.at_peak.items() if amount > 0]
    total = sum(amount for _, amount in parts)
    if total <= 0:
        return None
    place, shapes = 0.0, []
    for kind, amount in parts:
        shapes.append(
            element(
                "rect",
                title(f"{kind}: {size(amount)}"),
                x=percent(place),
                y=0,
                width=percent(amount / total),
                height=30,
                class_=f"phase {kind_class(kind)}",
            )
        )
        place += amount / total
    return chart(
        "What fills the peak: " + ", ".join(f"{kind} {size(amount)}" for kind, amount in parts), 34, shapes
    )


def growth_line(leak: MemoryGrowth) -> tuple[Markup, Markup] | None:
    """Return the axis of bytes, and the chart of memory at the same point of each step."""
    series = [value for v in leak.series if (value := drawable(v)) is not None]
    if len(series) < 3:
        return None
    low, high = min(series), max(series)
    margin = (high - low) * 0.1 or abs(high) * 0.05 or 1.0
    x, y = Scale(0, len(series) - 1), Scale(low - margin, high + margin)
    left, grid = byte_levels(y, PLOT_HEIGHT // 2)
    path = "M" + " L".join(_point(x(i), y(value)) for i, value in enumerate(series))
    drawn = stretched([element("path", d=path, class_="curve " + ("leaking" if leak.leaking else "steady"))])
    label = f"Memory at the same point of {len(series)} steps, from {size(series[0])} to {size(series[-1])}"
    return left, chart(label, PLOT_HEIGHT // 2, [*grid, drawn], "chart plot half")


def _point(x: float, y: float) -> str:
    return f"{UNITS * x:.1f} {UNITS * (1 - y):.1f}"


def _positive(value: object) -> bool:
    number = drawable(value)
    return number is not None and number > 1e-9


def kinds_present(memory: MemorySeen) -> Iterator[tuple[str, str, str]]:
    """Yield each kind, its CSS class and its share of the peak, largest first."""
    total = sum(amount for amount in memory.at_peak.values() if amount > 0) or 1
    for kind, amount in sorted(memory.at_peak.items(), key=lambda part: -part[1]):
        if amount > 0:
            yield kind, kind_class(kind), f"{size(amount)}, {100 * amount / total:.0f} %"
