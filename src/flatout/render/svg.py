"""SVG building blocks of the charts.

Horizontal positions are percentages and text keeps its size in pixels, so a chart is readable on any screen.
Colours come from CSS classes of the page, which support dark mode. SVG paths cannot use percentages:
curves are drawn in an inner box of UNITS x UNITS that is stretched without stretching the strokes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from flatout.render.formatting import legible

UNITS = 1000
ROOM = 0.08  # margin around the outermost values, as a share of the span


def element(name: str, *children: str, **attributes: object) -> Markup:
    """Return one element. Text is escaped unless it is Markup.

    Underscores in attribute names become hyphens; ``class_`` becomes ``class``.
    """
    spelled = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _spelled(value))
        for key, value in attributes.items()
        if value is not None
    )
    inside = Markup("").join(
        child if isinstance(child, Markup) else escape(legible(child)) for child in children
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), spelled, inside)


def _spelled(value: object) -> str:
    return (
        f"{value:.2f}".rstrip("0").rstrip(".")
        if isinstance(value, float)
        else legible(value, limit=1_000_000)
    )  # a path is long


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}".rstrip("0").rstrip(".") + "%"


def chart(label: str, height: int, children: Iterable[str], class_: str = "chart") -> Markup:
    """Return the outer frame of a chart. ``label`` is its text for screen readers."""
    return element("svg", *children, role="img", aria_label=label, class_=class_, width="100%", height=height)


def stretched(children: Iterable[str]) -> Markup:
    """Return an inner box of UNITS x UNITS that fills the chart."""
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {UNITS} {UNITS}",
        preserveAspectRatio="none",
        width="100%",
        height="100%",
    )


def title(text: str) -> Markup:
    """Return a tooltip."""
    return element("title", text)


@dataclass(frozen=True)
class Scale:
    """Map a value to a position between 0 and 1. Values outside the range are clamped."""

    low: float
    high: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        if self.logarithmic:
            if value <= 0:
                return 0.0
            place = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            # Halved, because the difference of two large numbers of opposite sign may overflow.
            span = self.high / 2 - self.low / 2
            place = (value / 2 - self.low / 2) / span if span > 0 else 0.5
        return min(1.0, max(0.0, place))


def corner(x: float, y: float) -> str:
    """Return a point of a path in a `stretched` box, from positions between 0 and 1."""
    return f"{UNITS * x:.1f} {UNITS * (1 - y):.1f}"


def line_through(points: Iterable[tuple[float, float]], x: Scale, y: Scale) -> str:
    return "M" + " L".join(corner(x(at), y(value)) for at, value in points)


def stretched_line(points: Iterable[tuple[float, float]], x: Scale, y: Scale, kind: str) -> Markup:
    return stretched([element("path", d=line_through(points, x, y), class_=kind)])


def with_room(values: Sequence[float]) -> Scale:
    """Return a scale with a margin around the outermost values."""
    low, high = min(values), max(values)
    room = ROOM * (high - low) or abs(high) * ROOM or 1.0
    return Scale(low - room, high + room)


def ratio_scale(ratios: Sequence[float]) -> Scale:
    """Return a logarithmic scale, on which twice as fast and half as fast are equally far from 1."""
    low, high = min([*ratios, 1 / 1.05]), max([*ratios, 1.05])
    margin = (high / low) ** 0.06
    return Scale(low / margin, high * margin, logarithmic=True)


_RATIO_TICKS = (
    1,
    2,
    0.5,
    1.5,
    0.75,
    1.25,
    1.1,
    0.9,
    4,
    0.25,
    10,
    0.1,
    100,
    0.01,
    3,
    1.05,
    0.95,
    6,
    20,
    50,
    1.02,
    0.98,
)


def ratio_ticks(scale: Scale, apart: float = 0.12) -> list[float]:
    """Return round ratios for ticks, at least ``apart`` of the width from each other."""
    chosen: list[float] = []
    for tick in _RATIO_TICKS:
        if 0.03 < scale(tick) < 0.97 and all(abs(scale(tick) - scale(other)) >= apart for other in chosen):
            chosen.append(tick)
    return sorted(chosen)


def round_ticks(low: float, high: float, about: int = 4) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between ``low`` and ``high``."""
    rough = high / about - low / about
    if not rough > 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.99), 10 * power)
    first = math.ceil(low / step - 1e-9)
    ticks = [(first + i) * step for i in range(3 * about)]
    return [0.0 if abs(tick) < step / 1e6 else tick for tick in ticks if tick <= high + step * 1e-9] or [low]


def decades(values: Sequence[float]) -> Scale:
    """Return a logarithmic scale over whole powers of ten."""
    # Extended a little, so that no dot is cut at the edge.
    low, high = (
        10 ** math.floor(math.log10(min(values) / 1.6)),
        10 ** math.ceil(math.log10(max(values) * 1.6)),
    )
    return Scale(low, high if high > low else 10 * low, logarithmic=True)


def powers(scale: Scale) -> list[float]:
    first, last = round(math.log10(scale.low)), round(math.log10(scale.high))
    return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 5))]


def across(y: Scale, value: float, kind: str = "grid") -> Markup:
    """Return a line over the whole width of a plot."""
    place = percent(1 - y(value))
    return element("line", x1="0%", x2="100%", y1=place, y2=place, class_=kind)


def upright(x: Scale, value: float, kind: str = "grid") -> Markup:
    """Return a line over the whole height of a plot."""
    place = percent(x(value))
    return element("line", x1=place, x2=place, y1="0%", y2="100%", class_=kind)


def axis_beside(y: Scale, ticks: Sequence[tuple[float, str]], height: int) -> Markup:
    """Return the axis left of a plot, with tick labels."""
    texts = [
        element(
            "text", name, x="100%", y=percent(1 - y(t)), dy="0.32em", text_anchor="end", class_="label soft"
        )
        for t, name in ticks
    ]
    return element(
        "svg",
        *texts,
        aria_hidden="true",
        class_="chart levels",
        width=12 + round(7.5 * max((len(name) for _, name in ticks), default=1)),
        height=height,
    )


def axis_below(x: Scale, ticks: Sequence[tuple[float, str]]) -> Markup:
    """Return the axis below a plot, with ticks and labels."""
    shapes = [
        element("line", x1=percent(x(t)), x2=percent(x(t)), y1=0, y2=5, class_="axis") for t, _ in ticks
    ]
    shapes += [
        element(
            "text",
            name,
            x=percent(x(t)),
            y=18,
            text_anchor="start" if x(t) < 0.04 else "end" if x(t) > 0.96 else "middle",
            class_="label soft",
        )
        for t, name in ticks
    ]
    return element("svg", *shapes, aria_hidden="true", class_="chart row", width="100%", height=24)
