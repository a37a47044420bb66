"""Two charts by batch size: samples per second, and peak memory.

A full dot is measured, with its interval as a vertical line. A hollow dot is computed: the program's own
effective batch in micro-batches of that size.
"""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from flatout.render.charts import PLOT_HEIGHT
from flatout.render.formatting import drawable, figure, milliseconds, size, times
from flatout.render.memory_charts import byte_levels
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
from flatout.schema.batch import BatchPoint, BatchRecord

Plot = tuple[Markup, Markup, Markup]
ROOM_ABOVE = 1.18  # leaves space for labels
MEMORY_HEIGHT = 180
NEAR = 32  # a noise scale more than this factor outside the sizes is only marked by an arrow
LINE = 16  # pixels between labels


def speed_plot(record: BatchRecord) -> Plot | None:
    """Return the left axis, the plot and the axis below. None with fewer than two measured sizes."""
    drawn = [point for point in record.points if drawable(point.samples_per_s) and drawable(point.step_ms)]
    if len(drawn) < 2:
        return None
    x = _sizes(record)
    tops = [
        point.samples_per_s * (point.speed.high / point.speed.median if point.speed else 1.0)
        for point in drawn
        if point.samples_per_s
    ]
    y = Scale(0.0, ROOM_ABOVE * max(tops))
    levels = round_ticks(y.low, y.high)
    shapes = [
        *_grid(x, record),
        *(across(y, t) for t in levels),
        *_noise(record, x),
        stretched_line([(p.size, p.samples_per_s or 0.0) for p in drawn], x, y, "curve steady"),
    ]
    kept = [(p, value) for p in drawn if (value := drawable(p.kept_samples_per_s)) is not None]
    shapes += [
        element(
            "circle",
            title(
                f"{p.size} a batch, {figure(p.kept_micro_batches)} micro-batches and one update (computed): {figure(value)} samples/s"
            ),
            cx=percent(x(p.size)),
            cy=percent(1 - y(value)),
            r=4.5,
            class_="hollow",
        )
        for p, value in kept
        if p.size != record.own
    ]
    for point in drawn:
        shapes += _dot(point, x, y)
    shapes += _marks(record, x)
    label = "Samples per second by batch size: " + ", ".join(
        f"{point.size} {figure(point.samples_per_s)}" for point in drawn
    )
    return (
        axis_beside(y, [(t, figure(t)) for t in levels], PLOT_HEIGHT),
        chart(label, PLOT_HEIGHT, shapes, "chart plot"),
        _axis(x, record),
    )


def memory_plot(record: BatchRecord) -> Plot | None:
    drawn = [
        (point, value)
        for point in record.points
        if (value := drawable(point.peak_bytes)) is not None and value > 0
    ]
    if len(drawn) < 2:
        return None
    x, most, limit = _sizes(record), max(value for _, value in drawn), drawable(record.limit_bytes)
    shown = limit is not None and limit < 4 * most
    y = Scale(0.0, 1.12 * max(most, limit if shown and limit is not None else 0.0))
    left, levels = byte_levels(y, MEMORY_HEIGHT)
    shapes = [
        *_grid(x, record),
        *levels,
        stretched_line([(point.size, value) for point, value in drawn], x, y, "curve steady"),
    ]
    shapes += [
        element(
            "circle",
            title(f"{point.size} a batch: {size(value)}"),
            cx=percent(x(point.size)),
            cy=percent(1 - y(value)),
            r=4.5,
            class_="dot dot-compute",
        )
        for point, value in drawn
    ]
    if shown and limit is not None:
        shapes += [
            across(y, limit, "axis"),
            element(
                "text",
                f"limit {size(limit)}",
                x="0%",
                dx=4,
                y=percent(1 - y(limit)),
                dy=-4,
                class_="label soft",
            ),
        ]
    label = "Peak memory by batch size: " + ", ".join(f"{point.size} {size(value)}" for point, value in drawn)
    return left, chart(label, MEMORY_HEIGHT, shapes, "chart plot"), _axis(x, record)


def _sizes(record: BatchRecord) -> Scale:
    """Return the scale over all sizes, including those that did not fit, and a noise scale close to them."""
    every = [float(point.size) for point in record.points]
    noise = _noise_in_samples(record)
    near = [value for value in noise if value is not None and min(every) / NEAR <= value <= NEAR * max(every)]
    return Scale(min([*every, *near]) / 1.25, max([*every, *near]) * 1.25, logarithmic=True)


def _noise_in_samples(record: BatchRecord) -> tuple[float | None, float | None, float | None]:
    noise = record.noise
    if noise.batch is None:
        return None, None, None
    value, low, high = (drawable(each) if each else None for each in (noise.value, noise.low, noise.high))
    return value, low, high


def _noise(record: BatchRecord, x: Scale) -> Iterator[Markup]:
    value, low, high = _noise_in_samples(record)
    if low is not None and x.low < (high or x.high):
        left, right = x(low), x(high) if high is not None else 1.0
        tip = title(
            f"gradient noise scale at step {record.noise.step}: {figure(low)} to {figure(high) if high is not None else 'unknown'} samples"
        )
        yield element(
            "rect",
            tip,
            x=percent(left),
            y="0%",
            width=percent(max(0.002, right - left)),
            height="100%",
            class_="band",
        )
    if value is not None and x.low <= value <= x.high:
        yield upright(x, value, "axis dashed")


def _marks(record: BatchRecord, x: Scale) -> Iterator[Markup]:
    """Yield labels at the upper edge, at different heights so that they do not overlap."""
    value, low, _ = _noise_in_samples(record)
    places: list[tuple[float, str]] = [
        (float(at), name)
        for at, name in ((record.own, "own"), (record.knee, "enough"), (record.best, "fastest"))
        if at
    ]
    if low is not None:
        places.append(
            (
                value if value is not None and value <= x.high else max(low, x.low),
                f"noise scale, step {record.noise.step}"
                + ("" if value is not None and x.low <= value <= x.high else " →" if low > x.low else " ←"),
            )
        )
    together: dict[float, list[str]] = {}
    for at, name in places:
        together.setdefault(at, []).append(name)
    for row, (at, names) in enumerate(sorted(together.items())):
        beside, anchor = (-6, "end") if x(at) > 0.6 else (6, "start")
        yield element(
            "text",
            ", ".join(names),
            x=percent(x(at)),
            y=14 + LINE * (row % 4),
            dx=beside,
            text_anchor=anchor,
            class_="label",
        )


def _dot(point: BatchPoint, x: Scale, y: Scale) -> Iterator[Markup]:
    value, speed, place = point.samples_per_s or 0.0, point.speed, percent(x(point.size))
    if speed is not None and speed.median > 0:
        low, high = (y(value * each / speed.median) for each in (speed.low, speed.high))
        yield element("line", x1=place, x2=place, y1=percent(1 - low), y2=percent(1 - high), class_="axis")
    said = f", {times(speed.median)} the own size" if speed is not None else ""
    yield element(
        "circle",
        title(f"{point.size} a batch: {figure(value)} samples/s, {milliseconds(point.step_ms)} a step{said}"),
        cx=place,
        cy=percent(1 - y(value)),
        r=5,
        class_="dot dot-compute" if point.fits else "dot",
    )


def _grid(x: Scale, record: BatchRecord) -> Iterator[Markup]:
    for point in record.points:
        yield upright(x, point.size)
        if not point.fits:
            yield element(
                "text",
                point.status,
                x=percent(x(point.size)),
                y="97%",
                text_anchor="middle",
                class_="label soft",
            )


def _axis(x: Scale, record: BatchRecord) -> Markup:
    return axis_below(x, [(float(point.size), f"{point.size:,}") for point in record.points])
