"""The one way in which flatout draws: a `Plot`, and two kinds of rows made of it.

Horizontal positions are percentages and text keeps its size in pixels, so a chart is readable on any screen.
Colours come from CSS classes of the page, which support dark mode. Colour is never the only signal: bars have
names, what was not kept is a hollow dot, and shapes have tooltips.
"""

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup, escape

from flatout.render.formatting import safe_text, size

# Elements of HTML and SVG, the scales of charts, and their ticks.
#
# `element` cleans and escapes every text of a page, so nothing else has to.

MARGIN = 0.08  # margin around the outermost values, as a share of the span
MAX_CHARACTERS = 4000  # of a text
Ticks = Sequence[tuple[float, str]]  # value and label


def element(name: str, *children: str, **attributes: object) -> Markup:
    """Return one element. Text is cleaned and escaped unless it is Markup; None leaves an attribute out.

    Underscores in attribute names become hyphens; ``class_`` becomes ``class``."""
    pairs = Markup("").join(
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _attribute_text(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), pairs, Markup("").join(map(clean, children)))


def clean(text: str) -> Markup:
    """Return a text that is safe in a page. The home folder becomes ``~``: pages are shared."""
    if isinstance(text, Markup):
        return text
    home = os.path.expanduser("~").rstrip("/")
    safe = safe_text(text, MAX_CHARACTERS)
    return escape(safe.replace(f"{home}/", "~/") if home.startswith("/") else safe)


def _attribute_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return safe_text(value, limit=1_000_000)  # a path is long


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}".rstrip("0").rstrip(".") + "%"


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
            position = (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        else:
            # Halved, because the difference of two large numbers of opposite sign may overflow.
            span = self.high / 2 - self.low / 2
            position = (value / 2 - self.low / 2) / span if span > 0 else 0.5
        return min(1.0, max(0.0, position))


def padded_scale(values: Sequence[float]) -> Scale:
    """Return a scale with a margin around the outermost values."""
    low, high = min(values), max(values)
    margin = MARGIN * 2 * (high / 2 - low / 2) or abs(high) * MARGIN or 1.0
    return Scale(low - margin, high + margin)


def ratio_scale(ratios: Sequence[float]) -> Scale:
    """Return a logarithmic scale, on which twice as fast and half as fast are equally far from 1."""
    low, high = min([*ratios, 1 / 1.05]), max([*ratios, 1.05])
    margin = (high / low) ** 0.06
    return Scale(low / margin, high * margin, logarithmic=True)


# fmt: off
_RATIOS = (1, 2, 0.5, 1.5, 0.75, 1.25, 1.1, 0.9, 4, 0.25, 10, 0.1, 100, 0.01, 3, 1.05, 0.95, 6, 20, 50, 1.02, 0.98)
# fmt: on


def ratio_ticks(scale: Scale) -> list[float]:
    """Return round ratios for ticks, at least 0.12 of the width from each other."""
    chosen: list[float] = []
    for tick in _RATIOS:
        if 0.03 < scale(tick) < 0.97 and all(abs(scale(tick) - scale(other)) >= 0.12 for other in chosen):
            chosen.append(tick)
    return sorted(chosen)


def round_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between ``low`` and ``high``."""
    target = high / count - low / count
    if not target > 1e-300:
        return [low]
    power = 10.0 ** math.floor(math.log10(target))
    step = next((m * power for m in (1, 2, 5, 10) if m * power >= target * 0.99), 10 * power)
    first = math.ceil(low / step - 1e-9)
    ticks = [(first + i) * step for i in range(3 * count)]
    return [0.0 if abs(tick) < step / 1e6 else tick for tick in ticks if tick <= high + step * 1e-9] or [low]


def powers(scale: Scale) -> list[float]:
    """Return powers of ten on a logarithmic scale, at most about six."""
    first, last = math.ceil(math.log10(scale.low) - 1e-9), math.floor(math.log10(scale.high) + 1e-9)
    return [10.0**power for power in range(first, last + 1, max(1, (last - first) // 5))]


def number_ticks(scale: Scale, count: int = 4, unit: str = "") -> Ticks:
    """Return round numbers with as many decimals as tell them apart."""
    ticks = [tick for tick in round_ticks(scale.low, scale.high, count) if 0.01 < scale(tick) < 0.97]
    digits = next((d for d in range(8) if len({f"{tick:.{d}f}" for tick in ticks}) == len(ticks)), 8)
    return [
        (tick, (f"{tick:,.{digits}f}" if abs(tick) < 1e5 else f"{tick:.3g}").replace("-", "−") + unit)
        for tick in ticks
    ]


def byte_ticks(scale: Scale) -> Ticks:
    """Return round amounts of memory."""
    unit = 1024.0 ** next((power for power in (3, 2, 1) if scale.high >= 1024**power), 0)
    ticks = (tick * unit for tick in round_ticks(scale.low / unit, scale.high / unit))
    return [(tick, size(tick)) for tick in ticks if 0.01 < scale(tick) < 0.97]


HEIGHT_PX = 300
PATH_UNITS = 1000  # SVG paths cannot use percentages: they lie in a box of this size, which is stretched
DIAMOND = "M-8 0L0 -8L8 0L0 8Z"
LETTER_PX = 7.2  # mean, in labels
PHONE_PX = 320  # width of a plot on a phone
ROW_PX, BAR_PX, INTERVAL_PX = 62, 32, 46  # a bar with its name, a bar, an interval


class Plot:
    """A chart with a grid. Shapes are drawn in the order of the calls; ``kind`` is a CSS class."""

    def __init__(
        self,
        label: str,
        x: Scale,
        y: Scale,
        x_ticks: Ticks = (),
        y_ticks: Ticks = (),
        height: int = HEIGHT_PX,
        axis: str = "",
        grid: bool = True,
    ) -> None:
        """``label`` is the text for screen readers, ``axis`` the name of the axis below."""
        self.label, self.x, self.y, self.height, self.axis = label, x, y, height, axis
        self.x_ticks, self.y_ticks = x_ticks, y_ticks
        self.shapes: list[Markup] = []
        self._labels = 0
        if grid:
            for value, _ in x_ticks:
                self.rule(x=value, kind="grid")
            for value, _ in y_ticks:
                self.rule(y=value, kind="grid")

    def line(self, points: Iterable[tuple[float, float | None]], kind: str, tip: str = "") -> None:
        """Draw a curve. A value of None makes a gap."""
        paths = []
        for has_value, run in groupby(points, key=lambda point: point[1] is not None):
            if has_value:
                corners = [self._path_point(x, y) for x, y in run if y is not None]
                # One point becomes a line of almost no length, which the round line cap shows as a dot.
                paths.append("M" + " L".join(corners) + ("" if len(corners) > 1 else " h0.01"))
        if paths:
            self._add_path(" ".join(paths), f"curve {kind}", tip)

    def area(self, points: Sequence[tuple[float, float, float]], kind: str, tip: str = "") -> None:
        """Fill between two curves, from points of x, low and high."""
        corners = [self._path_point(x, low) for x, low, _ in points]
        corners += [self._path_point(x, high) for x, _, high in reversed(points)]
        self._add_path("M" + " L".join(corners) + " Z", f"area {kind}", tip)

    def band(self, low: float, high: float, kind: str, tip: str = "") -> None:
        """Fill the height of the plot between two values of x."""
        self.bar(low, high, self.y.low, self.y.high, f"band {kind}", tip)

    def bar(self, left: float, right: float, low: float, high: float, kind: str, tip: str = "") -> None:
        x, y = self.x(left), 1 - self.y(high)
        self._add(
            "rect",
            tip,
            x=percent(x),
            y=percent(y),
            width=percent(max(self.x(right) - x, 0.002)),
            height=percent(1 - self.y(low) - y),
            class_=kind,
        )

    def rule(
        self, x: float | None = None, y: float | None = None, kind: str = "axis", text: str = ""
    ) -> None:
        """Draw a line over the whole plot, at ``x`` or at ``y``. Texts at ``x`` get different heights."""
        if x is not None:
            x_pos = percent(self.x(x))
            self._add("line", x1=x_pos, x2=x_pos, y1="0%", y2="100%", class_=kind)
            if text:
                is_right = self.x(x) > 0.6
                self.text(x, None, text, dx=-6 if is_right else 6, anchor="end" if is_right else "start")
        elif y is not None:
            y_pos = percent(1 - self.y(y))
            self._add("line", x1="0%", x2="100%", y1=y_pos, y2=y_pos, class_=kind)
            if text:
                self.text(self.x.high, y, text, dy=-5, anchor="end")

    def text(
        self,
        x: float,
        y: float | None,
        text: str,
        kind: str = "",
        dx: float = 0,
        dy: float = 0,
        anchor: str = "start",
    ) -> None:
        """Write a text at a point. Without ``y`` it goes to the upper edge, below the one before."""
        if y is None:
            place: object = 14 + 16 * (self._labels % 4)
            self._labels += 1
        else:
            place = percent(1 - self.y(y))
        self.shapes.append(
            element(
                "text",
                text,
                x=percent(self.x(x)),
                y=place,
                dx=dx or None,
                dy=dy or None,
                text_anchor=anchor,
                class_=f"label {kind}".rstrip(),
            )
        )

    def dot(
        self,
        x: float,
        y: float,
        kind: str,
        tip: str = "",
        r: float = 5.0,
        diamond: bool = False,
        low: float | None = None,
        high: float | None = None,
        vertical: bool = True,
    ) -> None:
        """Draw a point with its interval, which is ``upright`` or lies."""
        x_pos, y_pos = percent(self.x(x)), percent(1 - self.y(y))
        if low is not None and high is not None:
            scale = self.y if vertical else self.x
            first, second = ((percent(1 - scale(v)) if vertical else percent(scale(v))) for v in (low, high))
            (x1, x2), (y1, y2) = (x_pos, x_pos), (first, second)
            if not vertical:
                (x1, x2), (y1, y2) = (first, second), (y_pos, y_pos)
            self._add("line", class_=f"whisker {kind}", x1=x1, x2=x2, y1=y1, y2=y2)
        if diamond:
            mark = element("path", *_tip(tip), d=DIAMOND, class_=f"dot {kind}")
            self._add("svg", "", mark, x=x_pos, y=y_pos, width=1, height=1, overflow="visible")
        else:
            self._add("circle", tip, cx=x_pos, cy=y_pos, r=r, class_=f"dot {kind}")

    def markup(self) -> Markup:
        """Return the chart with its axes, as a grid of HTML."""
        plot = element(
            "svg",
            *self.shapes,
            role="img",
            aria_label=self.label,
            class_="plot" if self.x_ticks else "rows",
            width="100%",
            height=self.height,
        )
        if not self.x_ticks and not self.y_ticks:
            return plot
        y_labels = [
            element("text", name, x="100%", y=percent(1 - self.y(value)), dy=4, text_anchor="end")
            for value, name in self.y_ticks
        ]
        width = 12 + round(LETTER_PX * max((len(name) for _, name in self.y_ticks), default=-1.5))
        x_labels = [shape for value, name in self.x_ticks for shape in self._tick(value, name)]
        return element(
            "div",
            element("svg", *y_labels, aria_hidden="true", class_="beside", width=width, height=self.height),
            plot,
            element("span"),
            element("svg", *x_labels, aria_hidden="true", class_="below", width="100%", height=24),
            *([element("span"), element("p", self.axis, class_="axis-name")] if self.axis else []),
            class_="chart",
        )

    def _tick(self, value: float, name: str) -> list[Markup]:
        place = self.x(value)
        anchor = "start" if place < 0.04 else "end" if place > 0.96 else "middle"
        return [
            element("line", x1=percent(place), x2=percent(place), y1=0, y2=5, class_="axis"),
            element("text", name, x=percent(place), y=18, text_anchor=anchor),
        ]

    def _path_point(self, x: float, y: float) -> str:
        return f"{PATH_UNITS * self.x(x):.1f} {PATH_UNITS * (1 - self.y(y)):.1f}"

    def _add_path(self, path: str, kind: str, tip: str) -> None:
        shape = element("path", *_tip(tip), d=path, class_=kind)
        box = f"0 0 {PATH_UNITS} {PATH_UNITS}"
        self._add("svg", "", shape, viewBox=box, preserveAspectRatio="none", width="100%", height="100%")

    def _add(self, name: str, tip: str = "", *children: Markup, **attributes: object) -> None:
        self.shapes.append(element(name, *_tip(tip), *children, **attributes))


def _tip(text: str) -> list[Markup]:
    return [element("title", text)] if text else []


@dataclass(frozen=True)
class Segment:
    """A part of a bar. ``tip`` says its value."""

    name: str
    value: float
    kind: str
    tip: str


def bars(label: str, rows: Sequence[tuple[str, Sequence[Segment]]]) -> Plot | None:
    """Return stacked bars on one scale, each below its name; the longest fills the width. None if there is nothing to draw.

    A dotted line shows what a bar lacks of it."""
    totals = [sum(part.value for part in parts) for _, parts in rows]
    longest = max(totals, default=0.0)
    if longest <= 0:
        return None
    has_names = any(name for name, _ in rows)
    row = ROW_PX if has_names else BAR_PX + 8
    plot = Plot(label, Scale(0, longest), Scale(0, row * len(rows)), height=row * len(rows))
    for number, ((name, parts), total) in enumerate(zip(rows, totals, strict=True), 1):
        bottom = row * (len(rows) - number) + 6
        if name:
            plot.text(0, bottom + BAR_PX + 9, name)
        start = 0.0
        for part in parts:
            width = part.value / longest
            plot.bar(start, start + part.value, bottom, bottom + BAR_PX, f"bar {part.kind}", part.tip)
            if len(part.name) * LETTER_PX + 8 <= width * PHONE_PX:
                plot.text(start + part.value / 2, bottom + 11, part.name, f"on {part.kind}", anchor="middle")
            start += part.value
        if total < 0.995 * longest:
            plot.line([(total, bottom + BAR_PX / 2), (longest, bottom + BAR_PX / 2)], "rest")
    return plot


@dataclass(frozen=True)
class Interval:
    """A row of `intervals`."""

    text: str
    value: float
    low: float | None
    high: float | None
    kind: str  # kept, dropped or total


def intervals(
    label: str,
    rows: Sequence[Interval],
    x: Scale,
    ticks: Ticks,
    noise_floor: tuple[float, float] | None = None,
) -> Plot:
    """Return a row for each value with its interval, below its text, and a line at 1.

    ``noise_floor``: a band of values that mean nothing."""
    plot = Plot(
        label, x, Scale(0, INTERVAL_PX * len(rows)), ticks, height=INTERVAL_PX * len(rows), grid=False
    )
    if noise_floor is not None:
        plot.band(*noise_floor, "floor", "the noise floor: the plain program against itself")
    plot.rule(x=1.0, kind="unity")
    for number, row in enumerate(rows, 1):
        bottom = INTERVAL_PX * (len(rows) - number) + 12
        plot.text(x.low, bottom + 17, row.text)
        total = row.kind == "total"
        plot.dot(row.value, bottom, row.kind, row.text, 5.5, total, row.low, row.high, vertical=False)
    return plot
