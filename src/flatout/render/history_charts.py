"""The charts of a job's runs: one place per run, in the order of their starts.

A line joins finished runs of one origin only: machine, version of torch, device and number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from flatout.render.formatting import day, drawable, figure, one_line, size
from flatout.render.svg import (
    Scale,
    across,
    axis_below,
    axis_beside,
    chart,
    element,
    percent,
    round_ticks,
    stretched_line,
    title,
    upright,
)
from flatout.schema.history import Origin, RunSeen

MOST_RUNS = 200  # in a chart
MANY_RUNS, SMALL = 60, 0.6  # from so many runs on, their marks are smaller
SPEED_HEIGHT, MEMORY_HEIGHT = 220, 96
ABOVE = 1.18  # times the largest value, for the letters of origins
CLOSE = 0.03  # a share of the width; a letter nearer to the one before is left out
MOST_DAYS = 3  # labels, on a narrow screen too
NARROWEST = 7  # characters of a label, so that charts of one job have the same width

Plot = tuple[Markup, Markup]  # axis beside, plot


@dataclass(frozen=True)
class Series:
    """The runs of a chart, and the origin of each as its number among ``origins``."""

    runs: Sequence[RunSeen]
    origins: Sequence[Origin]
    of: Sequence[int]

    @classmethod
    def make(cls, runs: Sequence[RunSeen]) -> Series:
        shown = runs[-MOST_RUNS:]
        origins: list[Origin] = []
        for run in shown:
            if run.origin not in origins:
                origins.append(run.origin)
        return cls(shown, origins, [origins.index(run.origin) for run in shown])

    def letter(self, run: RunSeen) -> str:
        """Name the origin of a run, if there are several."""
        return letter(self.origins.index(run.origin)) if len(self.origins) > 1 else ""


def letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def speed_plot(series: Series) -> Plot | None:
    """Return steps/s over the runs, with the range of live figures where there are some."""
    return _plot(
        series,
        lambda run: run.steps_per_s,
        lambda run: (run.low, run.high),
        lambda value: f"{value:g}",
        SPEED_HEIGHT,
        "Steps/s",
    )


def memory_plot(series: Series) -> Plot | None:
    largest = max((run.peak_memory_bytes or 0 for run in series.runs), default=0)
    unit, factor = ("GiB", 2**30) if largest >= 2**29 else ("MiB", 2**20)
    return _plot(
        series,
        lambda run: run.peak_memory_bytes / factor if run.peak_memory_bytes else None,
        lambda run: (None, None),
        lambda value: f"{value:g} {unit}",
        MEMORY_HEIGHT,
        f"Peak memory in {unit}",
    )


def _plot(
    series: Series,
    value_of: Callable[[RunSeen], float | None],
    range_of: Callable[[RunSeen], tuple[float | None, float | None]],
    name: Callable[[float], str],
    height: int,
    what: str,
) -> Plot | None:
    """Return a chart of one value over the runs; None for fewer than two."""
    values = [drawable(value_of(run)) for run in series.runs]
    ranges = [(drawable(low), drawable(high)) for low, high in map(range_of, series.runs)]
    known = [value for value in values if value is not None]
    if len(known) < 2 or max(known) <= 0:
        return None
    y = Scale(0.0, ABOVE * max([*known, *(high for _, high in ranges if high is not None)]))
    x = _places(series)
    ticks = [tick for tick in round_ticks(0.0, y.high, 4 if height > 150 else 2) if y(tick) < 0.97]
    shapes = [across(y, tick) for tick in ticks]
    shapes += _borders(series, x, lettered=height == SPEED_HEIGHT)
    for origin in range(len(series.origins)):
        finished = [
            (float(at), value)
            for at, (run, value) in enumerate(zip(series.runs, values, strict=True))
            if value is not None and series.of[at] == origin and run.result == "finished"
        ]
        if len(finished) > 1:
            shapes.append(stretched_line(finished, x, y, "curve joined"))
    for at, (run, value) in enumerate(zip(series.runs, values, strict=True)):
        if value is not None:
            shapes += _point(series, run, x(at), y, value, ranges[at])
    label = f"{what} of {len(known)} runs, from {figure(min(known))} to {figure(max(known))}"
    return (
        axis_beside(y, [(tick, f"{name(tick):>{NARROWEST}}") for tick in ticks], height),
        chart(label, height, shapes, "chart plot"),
    )


def days_axis(series: Series) -> Plot:
    """Return the axis below the plots: some days, or times of one day."""
    return axis_beside(Scale(0.0, 1.0), [(0.0, " " * NARROWEST)], 24), axis_below(
        _places(series), _days(series.runs)
    )


def _places(series: Series) -> Scale:
    return Scale(-0.5, len(series.runs) - 0.5)


def _borders(series: Series, x: Scale, lettered: bool) -> list[Markup]:
    """Return a line wherever the origin changes, if ``lettered`` with the letter of the next one."""
    if len(series.origins) == 1:
        return []
    shapes, labelled = [], -1.0
    for at, origin in enumerate(series.of):
        if at and origin == series.of[at - 1]:
            continue
        place = x(at - 0.5)
        if at:
            shapes.append(upright(x, at - 0.5, "border"))
        if lettered and place - labelled >= CLOSE:
            shapes.append(
                element("text", letter(origin), x=percent(place), dx=5, y=15, class_="label soft strong")
            )
            labelled = place
    return shapes


def _point(
    series: Series,
    run: RunSeen,
    place: float,
    y: Scale,
    value: float,
    ends: tuple[float | None, float | None],
) -> list[Markup]:
    shapes, (low, high) = [], ends
    if low is not None and high is not None:
        shapes.append(
            element(
                "line",
                x1=percent(place),
                x2=percent(place),
                y1=percent(1 - y(high)),
                y2=percent(1 - y(low)),
                class_="whisker",
            )
        )
    shape = sign(run.result, bool(run.levers), title(_said(run, series.letter(run))))
    if len(series.runs) >= MANY_RUNS:
        shape = element("g", shape, transform=f"scale({SMALL})")
    return [
        *shapes,
        element(
            "svg", shape, x=percent(place), y=percent(1 - y(value)), overflow="visible", width=1, height=1
        ),
    ]


def sign(result: str, under_plan: bool, *children: Markup) -> Markup:
    """Return the mark of a run around (0, 0): its result by its shape too, full if a plan was used."""
    kind = f"run {result}{' planned' if under_plan else ''}"
    if result == "failed":
        return element("path", *children, d="M-5-5L5 5M-5 5L5-5", class_=kind)
    if result == "interrupted":
        return element("rect", *children, x=-4.5, y=-4.5, width=9, height=9, class_=kind)
    return element("circle", *children, r=4.5, class_=kind)


def _said(run: RunSeen, origin: str) -> str:
    parts = [
        f"{day(run.created)}{f' ({origin})' if origin else ''}: {run.result}",
        f"{figure(run.steps_per_s)} steps/s",
        *([f"{figure(run.low)} to {figure(run.high)}"] if run.low is not None else []),
        size(run.peak_memory_bytes),
        f"limited by {one_line(run.limited_by, 80)}",
        one_line(", ".join(run.levers), 120) or "without a plan",
    ]
    return ", ".join(parts)


def _days(runs: Sequence[RunSeen]) -> list[tuple[float, str]]:
    """Return a few runs with their day, or with their time if all are of one day."""
    days = {run.created[:10] for run in runs}
    shown = (lambda run: run.created[11:16]) if len(days) == 1 else (lambda run: run.created[:10])
    count = min(MOST_DAYS, len(runs))
    places = sorted({round(each * (len(runs) - 1) / max(1, count - 1)) for each in range(count)})
    return [
        (float(at), one_line(shown(runs[at]), 12))
        for number, at in enumerate(places)
        if number == 0 or shown(runs[at]) != shown(runs[places[number - 1]])
    ]
