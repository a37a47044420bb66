"""The one way in which flatout draws: a `Plot`, and two kinds of rows made of it.

Horizontal positions are percentages and text keeps its size in pixels, so a chart is readable on any screen.
Colours come from CSS classes of the page, which support dark mode. Colour is never the only signal: bars have
names, what was not kept is a hollow dot, and shapes have tooltips.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from markupsafe import Markup

from flatout.render.svg import Scale, Ticks, element, percent

HEIGHT = 300
UNITS = 1000  # SVG paths cannot use percentages: they lie in a box of this size, which is stretched
SHAPES = {"diamond": "M-8 0L0 -8L8 0L0 8Z"}
LETTER = 7.2  # pixels, mean width of a letter of the labels
NARROW = 320  # pixels, width of a plot on a phone
ROW, BAR, LINE = 62, 32, 46  # pixels: a bar with its name, a bar, a row of intervals


class Plot:
    """A chart with a grid. Shapes are drawn in the order of the calls; ``kind`` is a CSS class."""

    def __init__(
        self,
        label: str,
        x: Scale,
        y: Scale,
        x_ticks: Ticks = (),
        y_ticks: Ticks = (),
        height: int = HEIGHT,
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
        pieces = []
        for there, run in groupby(points, key=lambda point: point[1] is not None):
            if there:
                corners = [self._corner(x, y) for x, y in run if y is not None]
                # One point becomes a line of almost no length, which the round line cap shows as a dot.
                pieces.append("M" + " L".join(corners) + ("" if len(corners) > 1 else " h0.01"))
        if pieces:
            self._stretched(" ".join(pieces), f"curve {kind}", tip)

    def area(self, points: Sequence[tuple[float, float, float]], kind: str, tip: str = "") -> None:
        """Fill between two curves, from points of x, low and high."""
        corners = [self._corner(x, low) for x, low, _ in points]
        corners += [self._corner(x, high) for x, _, high in reversed(points)]
        self._stretched("M" + " L".join(corners) + " Z", f"area {kind}", tip)

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
            across = percent(self.x(x))
            self._add("line", x1=across, x2=across, y1="0%", y2="100%", class_=kind)
            if text:
                left = self.x(x) > 0.6
                self.text(x, None, text, dx=-6 if left else 6, anchor="end" if left else "start")
        elif y is not None:
            down = percent(1 - self.y(y))
            self._add("line", x1="0%", x2="100%", y1=down, y2=down, class_=kind)
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
        shape: str = "",
        low: float | None = None,
        high: float | None = None,
        upright: bool = True,
        text: str = "",
    ) -> None:
        """Draw a point with its interval, which is ``upright`` or lies. ``shape`` is a key of SHAPES."""
        across, down = percent(self.x(x)), percent(1 - self.y(y))
        if low is not None and high is not None:
            scale = self.y if upright else self.x
            first, second = ((percent(1 - scale(v)) if upright else percent(scale(v))) for v in (low, high))
            ends = (
                {"x1": across, "x2": across, "y1": first, "y2": second}
                if upright
                else {"x1": first, "x2": second, "y1": down, "y2": down}
            )
            self._add("line", class_=f"whisker {kind}", **ends)
        if shape:
            mark = element("path", *_tip(tip), d=SHAPES[shape], class_=f"dot {kind}")
            self._add("svg", "", mark, x=across, y=down, width=1, height=1, overflow="visible")
        else:
            self._add("circle", tip, cx=across, cy=down, r=r, class_=f"dot {kind}")
        if text:
            self.text(x, y, text, dx=r + 4, dy=4)

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
        beside = [
            element("text", name, x="100%", y=percent(1 - self.y(value)), dy=4, text_anchor="end")
            for value, name in self.y_ticks
        ]
        wide = 12 + round(LETTER * max((len(name) for _, name in self.y_ticks), default=-1.5))
        below = [shape for value, name in self.x_ticks for shape in self._tick(value, name)]
        return element(
            "div",
            element("svg", *beside, aria_hidden="true", class_="beside", width=wide, height=self.height),
            plot,
            element("span"),
            element("svg", *below, aria_hidden="true", class_="below", width="100%", height=24),
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

    def _corner(self, x: float, y: float) -> str:
        return f"{UNITS * self.x(x):.1f} {UNITS * (1 - self.y(y)):.1f}"

    def _stretched(self, path: str, kind: str, tip: str) -> None:
        shape = element("path", *_tip(tip), d=path, class_=kind)
        box = f"0 0 {UNITS} {UNITS}"
        self._add("svg", "", shape, viewBox=box, preserveAspectRatio="none", width="100%", height="100%")

    def _add(self, name: str, tip: str = "", *children: Markup, **attributes: object) -> None:
        self.shapes.append(element(name, *_tip(tip), *children, **attributes))


def _tip(text: str) -> list[Markup]:
    return [element("title", text)] if text else []


@dataclass(frozen=True)
class Part:
    """A part of a bar. ``tip`` says its value."""

    name: str
    value: float
    kind: str
    tip: str


def bars(label: str, rows: Sequence[tuple[str, Sequence[Part]]], whole: float | None = None) -> Plot | None:
    """Return stacked bars on one scale, each below its name. None if there is nothing to draw.

    ``whole`` fills the width; by default, the longest bar does. A dotted line shows what a bar lacks of it.
    """
    totals = [sum(part.value for part in parts) for _, parts in rows]
    whole = whole or max(totals, default=0.0)
    if whole <= 0:
        return None
    named = any(name for name, _ in rows)
    row = ROW if named else BAR + 8
    plot = Plot(label, Scale(0, whole), Scale(0, row * len(rows)), height=row * len(rows))
    for number, ((name, parts), total) in enumerate(zip(rows, totals, strict=True), 1):
        foot = row * (len(rows) - number) + 6
        if name:
            plot.text(0, foot + BAR + 9, name)
        place = 0.0
        for part in parts:
            width = part.value / whole
            plot.bar(place, place + part.value, foot, foot + BAR, f"bar {part.kind}", part.tip)
            if len(part.name) * LETTER + 8 <= width * NARROW:
                plot.text(place + part.value / 2, foot + 11, part.name, f"on {part.kind}", anchor="middle")
            place += part.value
        if total < 0.995 * whole:
            plot.line([(total, foot + BAR / 2), (whole, foot + BAR / 2)], "rest")
    return plot


@dataclass(frozen=True)
class Interval:
    """A row of `intervals`. ``dots`` are drawn in place of ``value``, if there are some."""

    text: str
    value: float
    low: float | None
    high: float | None
    kind: str  # kept, dropped or total
    dots: Sequence[tuple[float, str]] = ()  # value and tooltip


def intervals(
    label: str,
    rows: Sequence[Interval],
    x: Scale,
    ticks: Ticks,
    zero: float,
    floor: tuple[float, float] | None = None,
) -> Plot:
    """Return a row for each value with its interval, below its text, and a line at ``zero``.

    ``floor``: a band of values that mean nothing.
    """
    plot = Plot(label, x, Scale(0, LINE * len(rows)), ticks, height=LINE * len(rows), grid=False)
    if floor is not None:
        plot.band(*floor, "floor", "the noise floor: the plain program against itself")
    plot.rule(x=zero, kind="unity")
    for number, row in enumerate(rows, 1):
        foot = LINE * (len(rows) - number) + 12
        plot.text(x.low, foot + 17, row.text)
        for value, tip in row.dots:
            plot.dot(value, foot, row.kind, tip, r=4.5)
        if not row.dots:
            shape = "diamond" if row.kind == "total" else ""
            plot.dot(row.value, foot, row.kind, row.text, 5.5, shape, row.low, row.high, upright=False)
    return plot
