"""Chart of time against memory: a dot per measured plan, a line for the limit, a diamond for the choice."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from flatout.render import summary
from flatout.render.charts import PLOT_HEIGHT
from flatout.render.formatting import drawable, interval, one_line, size, times
from flatout.render.svg import (
    Scale,
    across,
    axis_below,
    axis_beside,
    chart,
    element,
    percent,
    round_ticks,
    title,
    upright,
    with_room,
)
from flatout.schema.session import SessionRecord, TimeMemoryPoint


def frontier_plot(session: SessionRecord) -> tuple[Markup, Markup, Markup] | None:
    """Return the time axis, the plot and the memory axis. None with fewer than two points."""
    points = summary.frontier(session)
    if len(points) < 2:
        return None
    limit = drawable(session.memory_limit_bytes)
    peaks = [float(point.peak_bytes or 0) for point in points] + ([limit] if limit else [])
    ends = [end for point in points for end in summary.relative_time(point) if end is not None]
    unit = 2.0**30 if max(peaks) >= 2**30 else 2.0**20
    x = with_room([peak / unit for peak in peaks])
    y = with_room(ends)
    levels = round_ticks(y.low, y.high)
    shapes = [across(y, t) for t in levels]
    if limit:
        place = x(limit / unit)
        shapes.append(upright(x, limit / unit, "axis limit"))
        beside, anchor = (-6, "end") if place > 0.5 else (6, "start")
        shapes.append(
            element(
                "text",
                f"limit {size(limit)}",
                x=percent(place),
                y=14,
                dx=beside,
                text_anchor=anchor,
                class_="label strong",
            )
        )
    shapes += [shape for at, point in enumerate(points) for shape in _dot(point, at + 1, x, y, unit)]
    word = "GiB" if unit == 2.0**30 else "MiB"
    ticks = round_ticks(x.low, x.high, 5)
    said = "; ".join(
        f"{point.plan}: {size(point.peak_bytes)}, {times(summary.relative_time(point)[0])}"
        for point in points
    )
    return (
        axis_beside(y, [(t, f"{t:.3g}x") for t in levels], PLOT_HEIGHT),
        chart(f"Time of a step against the peak of its tensors. {said}", PLOT_HEIGHT, shapes, "chart plot"),
        axis_below(x, [(t, f"{t:g} {word}") for t in ticks]),
    )


def _dot(point: TimeMemoryPoint, number: int, x: Scale, y: Scale, unit: float) -> Iterator[Markup]:
    """Yield a diamond for the chosen plan, a full dot for one that fits, a hollow dot for one that does not.

    The number is the plan's row in the table.
    """
    time, low, high = summary.relative_time(point)
    across, down = percent(x((point.peak_bytes or 0) / unit)), percent(1 - y(time))
    if low is not None and high is not None:
        yield element(
            "line",
            x1=across,
            x2=across,
            y1=percent(1 - y(low)),
            y2=percent(1 - y(high)),
            class_="whisker kept",
        )
    inside = f" ({interval(low, high)})" if low is not None and high is not None else ""
    tip = title(
        f"{number}: {one_line(point.plan, 120)}: {size(point.peak_bytes)}, time {times(time)}{inside}"
    )
    mark = (
        element("path", tip, d="M-8 0L0 -8L8 0L0 8Z", class_="mark total")
        if point.chosen
        else element("circle", tip, r=5.5, class_=f"mark {'kept' if point.fits else 'dropped'}")
    )
    yield element("svg", mark, x=across, y=down, overflow="visible", width=1, height=1)
    yield element("text", str(number), x=across, y=down, dx=9, dy=-7, class_="label")
