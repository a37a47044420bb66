"""Render the predicted memory of a step: table, page, and chart of peak memory by batch size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from flatout.render import formatting
from flatout.render.charts import PLOT_HEIGHT
from flatout.render.memory_charts import byte_levels, kind_class
from flatout.render.page import environment
from flatout.render.svg import Scale, chart, element, percent, title
from flatout.schema.memory_forecast import FORECAST_KINDS, MemoryForecast, MemoryPoint

MODULES_SHOWN = 8
PEAK = "peak of the tensors in a step"
BAR = 0.56  # width of a bar, as a share of its slot
COLOURS = {"held by the program": "kind-7", "temporary": "kind-6"}


def headline(record: MemoryForecast) -> str:
    own = record.own_point()
    if own is None or own.peak_bytes is None:
        return "The memory of a step is not known"
    size = f" with {formatting.count(record.own)} samples a batch" if record.own else ""
    where = (
        "on a CUDA device"
        if record.simulated or record.device == "cuda"
        else f"on the {formatting.one_line(record.device, 20).upper()}"
    )
    return f"A step{size} takes {formatting.size(own.peak_bytes)} of tensors {where}"


def because(record: MemoryForecast) -> str:
    """Return the prediction error, the largest batch that fits, and advice."""
    said = [sentence for point in record.points if (sentence := verdict(point))]
    if record.limit_bytes is not None and record.largest is not None:
        limit = f"{formatting.size(record.limit_bytes)} ({formatting.one_line(record.limit_of, 60)})"
        said.append(
            f"The largest batch that is predicted to fit into {limit} has {formatting.several(record.largest, 'sample')}, "
            f"{formatting.size(record.largest_peak_bytes)}."
            if record.largest
            else f"Not even one sample is predicted to fit into {limit}."
        )
    return " ".join([*said, *filter(None, [formatting.one_line(record.advice)])])


def verdict(point: MemoryPoint) -> str:
    size = f"with {formatting.count(point.batch_size)} samples " if point.batch_size else ""
    if point.error is not None:
        missed = (
            "right to 0.1 %"
            if abs(point.error) < 0.001
            else f"{abs(point.error):.1%} too {'high' if point.error > 0 else 'low'}"
        )
        return f"A real step {size}took {formatting.size(point.measured_bytes)}: the prediction was {missed}."
    return (
        formatting.sentence(
            f"It could not be measured {size}({formatting.one_line(point.measured_why_not, 200)})"
        )
        if point.measured_why_not
        else ""
    )


def colour(kind: str) -> str:
    return COLOURS.get(kind) or kind_class(kind)


def kinds_in(record: MemoryForecast) -> list[str]:
    return [kind for kind in FORECAST_KINDS if any(point.kinds.get(kind, 0) > 0 for point in record.points)]


# -- the terminal --------------------------------------------------------------------------------------------


def memory_tables(record: MemoryForecast) -> RenderableType:
    """Return the terminal output, with a column per batch size and a row per kind."""
    shown = [point for point in record.points if not point.why_not]
    kinds = kinds_in(record)
    columns = [cells_of(point, kinds) for point in shown]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("samples a batch", *(column[0] for column in columns)):
        table.add_column(name, justify="left" if name == "samples a batch" else "right")
    for at, name in enumerate((PEAK, "measured", *kinds), start=1):
        cells = [_cell(record, point, column[at], at) for point, column in zip(shown, columns, strict=True)]
        if any(cell.plain for cell in cells):
            table.add_row(Text(name, style="bold" if at == 1 else ""), *cells)
    parts: list[RenderableType] = [
        Text(headline(record), style="bold"),
        Text(because(record)),
        Text(""),
        table,
    ]
    parts += [Text(sentence) for sentence in failures_of(record)]
    modules = modules_of(record)
    if modules:
        parts += [
            Text(""),
            Text("activations by module: " + ", ".join(f"{name} {size}" for name, size in modules)),
        ]
    return Group(*parts, Text(""))


def _cell(record: MemoryForecast, point: MemoryPoint, said: str, row: int) -> Text:
    over = row == 1 and record.limit_bytes is not None and (point.peak_bytes or 0) > record.limit_bytes
    return Text(said, style="bold red" if over else "bold" if row == 1 else "")


def cells_of(point: MemoryPoint, kinds: list[str]) -> list[str]:
    measured = (
        f"{formatting.size(point.measured_bytes)} ({round(point.error, 3) + 0.0:+.1%})"
        if point.error is not None
        else ""
    )
    return [
        formatting.count(point.batch_size) if point.batch_size else "its own",
        formatting.size(point.peak_bytes),
        measured,
        *(formatting.size(point.kinds[kind]) if point.kinds.get(kind) else "" for kind in kinds),
    ]


def failures_of(record: MemoryForecast) -> list[str]:
    return [
        f"{formatting.several(point.batch_size, 'sample')}: {formatting.sentence(point.why_not)}"
        for point in record.points
        if point.why_not
    ]


def modules_of(record: MemoryForecast) -> list[tuple[str, str]]:
    """Return the activations by module at the script's own batch size, largest first.

    Memory outside the model is included.
    """
    own = record.own_point()
    found = (
        sorted(own.by_module.items(), key=lambda item: -item[1])[:MODULES_SHOWN] if own is not None else []
    )
    return [(formatting.one_line(name, 60), formatting.size(size)) for name, size in found]


# -- the page ------------------------------------------------------------------------------------------------


def memory_html(record: MemoryForecast) -> str:
    kinds = kinds_in(record)
    own = record.own_point()
    legend = [
        (kind, colour(kind), formatting.size(own.kinds.get(kind, 0)) if own is not None else "")
        for kind in kinds
    ]
    shown = [point for point in record.points if not point.why_not]
    columns = [cells_of(point, kinds) for point in shown]
    rows = [
        (name, cells)
        for at, name in enumerate((PEAK, "measured", *kinds), start=1)
        if any(cells := [column[at] for column in columns])
    ]
    return (
        environment("report.css", "profile.css")
        .get_template("memory.html.j2")
        .render(
            headline=headline(record),
            because=because(record) or formatting.sentence(record.message),
            command=formatting.shell(record.command),
            plot=memory_plot(record),
            legend=legend,
            sizes=[_named(point, record) for point in shown],
            rows=rows,
            failures=failures_of(record),
            modules=modules_of(record),
            notes=[formatting.sentence(note) for note in record.notes[:20]],
            dateline=[part for part in (formatting.day(record.created), record.device) if part],
            version=formatting.one_line(record.flatout, 40),
        )
    )


def memory_plot(record: MemoryForecast) -> tuple[Markup, Markup, Markup] | None:
    """Return the axis of bytes, a stacked bar per batch size, and the labels. None without predictions."""
    points = [point for point in record.points if formatting.drawable(point.peak_bytes)]
    if not points:
        return None
    highest = max(max(point.peak_bytes or 0, point.measured_bytes or 0) for point in points)
    limit = (
        record.limit_bytes if record.limit_bytes is not None and record.limit_bytes <= 3 * highest else None
    )
    y = Scale(0.0, 1.08 * max(highest, limit or 0))
    left, grid = byte_levels(y, PLOT_HEIGHT)
    shapes = [*grid, *(shape for at, point in enumerate(points) for shape in _bar(point, at, len(points), y))]
    if limit is not None:
        there, said = percent(1 - y(limit)), f"limit {formatting.size(limit)}"
        shapes.append(element("line", title(said), x1="0%", x2="100%", y1=there, y2=there, class_="limit"))
        shapes.append(
            element("text", said, x="100%", y=there, dy="-0.4em", text_anchor="end", class_="label")
        )
    names = [
        element(
            "text",
            _named(point, record),
            x=percent((at + 0.5) / len(points)),
            y=18,
            text_anchor="middle",
            class_="label soft",
        )
        for at, point in enumerate(points)
    ]
    below = element("svg", *names, aria_hidden="true", class_="chart row", width="100%", height=24)
    said = "; ".join(
        f"{point.batch_size or 'its own'}: {formatting.size(point.peak_bytes)}" for point in points
    )
    return (
        left,
        chart(f"Peak memory of a step against batch size. {said}", PLOT_HEIGHT, shapes, "chart plot"),
        below,
    )


def _named(point: MemoryPoint, record: MemoryForecast) -> str:
    if point.batch_size is None:
        return "its own"
    return formatting.count(point.batch_size) + (
        " (its own)"
        if point.batch_size == record.own
        else " (fits)"
        if point.batch_size == record.largest
        else ""
    )


def _bar(point: MemoryPoint, at: int, bars: int, y: Scale) -> Iterator[Markup]:
    """Yield the pieces of a bar bottom-up, and a line with a dot at the measured peak."""
    x, width = (at + 0.5 - BAR / 2) / bars, BAR / bars
    below: float = 0
    for kind in FORECAST_KINDS:
        amount: Any = point.kinds.get(kind, 0)
        if amount > 0:
            tip = title(f"{kind}: {formatting.size(amount)}")
            yield element(
                "rect",
                tip,
                x=percent(x),
                y=percent(1 - y(below + amount)),
                width=percent(width),
                height=percent(y(below + amount) - y(below)),
                class_=f"phase {colour(kind)}",
            )
            below += amount
    if point.measured_bytes:
        there = percent(1 - y(point.measured_bytes))
        tip = title(f"measured: {formatting.size(point.measured_bytes)}")
        yield element(
            "line",
            x1=percent(x - width * 0.1),
            x2=percent(x + width * 1.1),
            y1=there,
            y2=there,
            class_="measured",
        )
        yield element("circle", tip, cx=percent(x + width * 1.1), cy=there, r=5, class_="mark total")
