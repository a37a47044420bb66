"""The three charts of the report: time of a step by phase, speed-up of each lever, and loss curves.

Each is a pure function from figures to inline SVG. Colour is never the only signal: phases keep their order
and names, a lever that was not kept is a hollow dot, the tuned curve is dashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from markupsafe import Markup

from flatout.render.before_after import PhasePart
from flatout.render.curves import Curve, LossCurves
from flatout.render.formatting import count, figure, interval, milliseconds, times
from flatout.render.svg import (
    Scale,
    across,
    axis_below,
    axis_beside,
    chart,
    corner,
    element,
    percent,
    ratio_ticks,
    round_ticks,
    stretched,
    title,
)
from flatout.schema.records import PHASES

# Minimum width of the plot in pixels on a phone, and on larger screens. Labels that do not fit are left out.
NARROW, WIDE = 320, 700
LETTER = 7.2  # mean width of a letter of the labels


def step_bars(
    plain: Sequence[PhasePart], tuned: Sequence[PhasePart], names: tuple[str, str] = ("plain", "tuned")
) -> Markup | None:
    """Return stacked bars of two steps by phase, on one scale of milliseconds."""
    sides = [
        (name, parts, sum(part.ms for part in parts))
        for name, parts in zip(names, (plain, tuned), strict=True)
    ]
    longest = max(total for _, _, total in sides)
    if longest <= 0:
        return None
    drawn = [side for side in sides if side[2] > 0]
    shapes = [
        shape
        for row, (name, parts, total) in enumerate(drawn)
        for shape in bar(name, parts, total, longest, 62 * row)
    ]
    saved = sides[0][2] - sides[1][2]
    if len(drawn) == 2 and saved > 0:
        shapes.append(
            element(
                "text",
                f"{milliseconds(saved)} saved",
                x="100%",
                y=62 + 13,
                text_anchor="end",
                class_="label soft",
            )
        )
    said = "; ".join(
        f"{name} {milliseconds(total)}: " + ", ".join(f"{p.phase} {milliseconds(p.ms)}" for p in parts)
        for name, parts, total in drawn
    )
    return chart(f"Time of a step by phase. {said}", 62 * len(drawn), shapes)


def bar(name: str, parts: Sequence[PhasePart], total: float, longest: float, top: int) -> Iterator[Markup]:
    """Yield one stacked bar of phases. ``longest`` fills the width.

    ``total`` and ``longest`` are in milliseconds, ``top`` is in pixels.
    """
    yield element(
        "text",
        element("tspan", name, class_="strong"),
        f"  {milliseconds(total)}",
        x=0,
        y=top + 13,
        class_="label",
    )
    place = 0.0
    for part in parts:
        width = part.ms / longest
        share = f"{part.ms / total:.0%}".replace("%", " %")
        tip = title(f"{name}: {part.phase} {milliseconds(part.ms)}, {share} of the step")
        kind = f"phase-{part.phase}" if part.phase in (*PHASES, "compute") else "phase-other"
        yield element(
            "rect", tip, x=percent(place), y=top + 20, width=percent(width), height=32, class_=f"phase {kind}"
        )
        middle = percent(place + width / 2)
        for screen, pixels, texts in (
            ("narrow", NARROW, (part.phase,)),
            ("wide", WIDE, (f"{part.phase} {share}", part.phase)),
        ):
            fitting = next((text for text in texts if len(text) * LETTER + 8 <= width * pixels), None)
            if fitting:
                yield element(
                    "text",
                    fitting,
                    x=middle,
                    y=top + 41,
                    text_anchor="middle",
                    class_=f"label on-phase on-{kind} {screen}-only",
                )
        place += width
    if place < 0.995:
        yield element("line", x1=percent(place), x2="100%", y1=top + 36, y2=top + 36, class_="saved")


def forest_row(
    scale: Scale,
    name: str,
    ratio: float,
    low: float | None,
    high: float | None,
    kept: bool,
    floor: tuple[float, float] | None,
    total: bool = False,
) -> Markup:
    """Return a row of the forest plot: interval, ratio (full dot if kept), noise floor, line at 1."""
    shapes = _backdrop(scale, floor)
    inside = interval(low, high)
    said = (
        f"{name}: {times(ratio)}"
        + (f", interval {inside}" if inside else "")
        + ("" if kept else ", not kept")
    )
    mark = "total" if total else "kept" if kept else "dropped"
    if low is not None and high is not None:
        a, b = scale(low), scale(high)
        shapes.append(
            element("line", x1=percent(a), x2=percent(b), y1="50%", y2="50%", class_=f"whisker {mark}")
        )
        shapes += [_mark(end, element("line", y1=-4, y2=4, class_=f"whisker {mark}")) for end in (a, b)]
    if total:
        shapes.append(
            _mark(scale(ratio), element("path", title(said), d="M-8 0L0 -8L8 0L0 8Z", class_="mark total"))
        )
    else:
        shapes.append(_mark(scale(ratio), element("circle", title(said), r=5.5, class_=f"mark {mark}")))
    return chart(said, 34, shapes, "chart row")


def _mark(place: float, shape: Markup) -> Markup:
    """Place a shape drawn around (0, 0) at ``place``, vertically centred in its row."""
    return element("svg", shape, x=percent(place), y="50%", overflow="visible", width=1, height=1)


def forest_axis(scale: Scale) -> Markup:
    """Return the axis of ratios below the rows."""
    ticks = ratio_ticks(scale)
    shapes = [
        element("line", x1=percent(scale(t)), x2=percent(scale(t)), y1=0, y2=5, class_="axis") for t in ticks
    ]
    shapes += [
        element("text", f"{t:g}x", x=percent(scale(t)), y=18, text_anchor="middle", class_="label soft")
        for t in ticks
    ]
    return chart("Scale: times as fast as the plain program", 24, shapes, "chart row")


def _backdrop(scale: Scale, floor: tuple[float, float] | None) -> list[Markup]:
    shapes = []
    if floor is not None:
        low, high = scale(min(floor)), scale(max(floor))
        tip = title(
            f"noise floor: the plain program against itself measured {interval(min(floor), max(floor))}"
        )
        shapes.append(
            element(
                "rect",
                tip,
                x=percent(low),
                y=0,
                width=percent(max(high - low, 0.004)),
                height="100%",
                class_="floor",
            )
        )
    return [
        *shapes,
        element("line", x1=percent(scale(1)), x2=percent(scale(1)), y1=0, y2="100%", class_="unity"),
    ]


PLOT_HEIGHT = 300


def loss_plot(
    curves: LossCurves, sides: tuple[str, str] = ("the plain", "the tuned program")
) -> tuple[Markup, Markup, Markup]:
    """Return the loss axis (left), the plot and the position axis (below)."""
    low, high = min(curves.drawn), max(curves.drawn)
    margin = (high / 2 - low / 2) * 0.1 or abs(high) * 0.05 or 1.0
    y = Scale(low - margin, high + margin)
    x = (
        Scale(curves.at[0], curves.at[-1])
        if len(curves.at) > 1
        else Scale(curves.at[0] - 1, curves.at[0] + 1)
    )
    levels = [tick for tick in round_ticks(y.low, y.high, 5) if 0.03 < y(tick) < 0.97]
    digits = next((d for d in range(8) if len({f"{tick:.{d}f}" for tick in levels}) == len(levels)), 8)
    names = [f"{tick:,.{digits}f}" if abs(tick) < 1e5 else f"{tick:.3g}" for tick in levels]
    left = axis_beside(y, list(zip(levels, names, strict=True)), PLOT_HEIGHT)
    grid = [across(y, tick) for tick in levels]
    drawn = stretched(
        [
            *_band(curves, x, y),
            *_line(curves, curves.plain, x, y, "plain"),
            *_line(curves, curves.tuned, x, y, "tuned"),
        ]
    )
    label = f"Loss of {sides[0]} and of {sides[1]} over {count(curves.total)} positions, from {figure(low)} to {figure(high)}"
    return (
        left,
        chart(label, PLOT_HEIGHT, [*grid, drawn, *_tips(curves, x)], "chart plot"),
        _positions(curves, x),
    )


def _positions(curves: LossCurves, x: Scale) -> Markup:
    ticks = [t for t in round_ticks(x.low, x.high, 4) if t == int(t)] or [round(curves.at[0])]
    return axis_below(x, [(t, count(t)) for t in ticks])


def _line(curves: LossCurves, curve: Curve, x: Scale, y: Scale, kind: str) -> Iterator[Markup]:
    pieces = [" L".join(corner(x(at), y(v)) for at, v in run) for run in _runs(curves.at, curve)]
    if pieces:
        # A piece of one point becomes a line of almost no length, which the round line cap shows as a dot.
        path = " ".join(f"M{piece}" + ("" if " L" in piece else " h0.01") for piece in pieces)
        yield element("path", d=path, class_=f"curve {kind}")


def _band(curves: LossCurves, x: Scale, y: Scale) -> Iterator[Markup]:
    for run in _runs(curves.at, curves.low):
        at = dict(zip(curves.at, curves.high, strict=True))
        there = [corner(x(a), y(v)) for a, v in run]
        back = [corner(x(a), y(high)) for a, _ in reversed(run) if (high := at[a]) is not None]
        yield element("path", d="M" + " L".join([*there, *back]) + " Z", class_="seeds")


def _runs(at: Sequence[float], curve: Curve) -> Iterator[list[tuple[float, float]]]:
    """Yield the runs of a curve between its gaps."""
    for there, group in groupby(zip(at, curve, strict=True), key=lambda point: point[1] is not None):
        if there:
            yield [(a, v) for a, v in group if v is not None]


def _tips(curves: LossCurves, x: Scale) -> Iterator[Markup]:
    """Yield invisible columns with the values as tooltips, at most 80."""
    stride = -(-len(curves.at) // 80)
    for i in range(0, len(curves.at), stride):
        there = x(curves.at[i])
        width = stride / len(curves.at)
        text = f"position {count(curves.at[i])}: plain {figure(curves.plain[i], 4)}, tuned {figure(curves.tuned[i], 4)}"
        yield element(
            "rect",
            title(text),
            x=percent(max(0.0, there - width / 2)),
            y=0,
            width=percent(width),
            height="100%",
            class_="tip",
        )
