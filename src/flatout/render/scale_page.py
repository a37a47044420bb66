"""Render predictions for many devices: page, table and summary."""

from __future__ import annotations

from markupsafe import Markup
from rich.table import Table

from flatout.render import formatting
from flatout.render.charts import PLOT_HEIGHT
from flatout.render.page import environment
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
from flatout.schema.scale import Link, ScalePoint, ScaleRecord

NAMES = {"ddp": "DDP", "fsdp": "FSDP", "hybrid": "Hybrid", "local": "Local SGD"}
COLUMNS = ("", "devices", "step", "waiting", "each sends", "efficiency", "bound by")
TICKS = 9  # maximum number of ticks below the chart


def strategies(record: ScaleRecord) -> list[str]:
    return list(dict.fromkeys(point.strategy for point in record.points))


def name_of(record: ScaleRecord, strategy: str) -> str:
    return (
        f"{NAMES.get(strategy, strategy)}, H = {record.local_steps}"
        if strategy == "local"
        else NAMES.get(strategy, strategy)
    )


def headline(record: ScaleRecord) -> str:
    """Return the most efficient strategy at the largest number of devices.

    Local SGD is left out unless it is the only strategy, because it changes what is learned.
    """
    there = [
        point
        for point in record.points
        if point.efficiency is not None and (point.strategy != "local" or len(strategies(record)) == 1)
    ]
    if not there:
        return "No prediction is possible"
    most = max(point.devices for point in there)
    best = max((point for point in there if point.devices == most), key=lambda point: point.efficiency or 0.0)
    return f"{name_of(record, best.strategy)} on {formatting.several(most, 'device')}: {100 * (best.efficiency or 0.0):.0f}\u00a0% efficient"


def because(record: ScaleRecord) -> str:
    timing = record.timing
    alone = f"one device needs {formatting.milliseconds(timing.step_ms)} for a step" if timing else ""
    batch = f" of {formatting.figure(timing.samples)} samples" if timing and timing.samples else ""
    kind = (
        "Each device keeps this batch"
        if record.scaling == "weak"
        else "This batch is split across the devices"
    )
    return formatting.sentence(f"Predicted, not measured: {alone}{batch}. {kind}. Network: {network(record)}")


def network(record: ScaleRecord) -> str:
    if record.network is None:
        return formatting.NOTHING
    nodes = (
        f", {record.node} devices a node joined by {spelled(record.inside)}"
        if record.inside is not None
        else ""
    )
    return f"{spelled(record.network)}{nodes}"


def spelled(link: Link) -> str:
    cards = "" if link.inside or not link.cards else f", {formatting.several(link.cards, 'card')} a node"
    return f"{formatting.one_line(link.name, 60)} ({formatting.figure(link.bandwidth_bytes_per_s / 1e9)} GB/s, {formatting.figure(link.latency_us)} us{cards})"


def share(value: float | None) -> str:
    number = formatting.drawable(value)
    return formatting.NOTHING if number is None else f"{100 * number:.1f} %"


def rows(record: ScaleRecord) -> list[tuple[str, ...]]:
    """Return a row per point, in the order of ``COLUMNS``.

    The last column shows the text before the colon. ``sentences`` gives the full text.
    """
    found: list[tuple[str, ...]] = []
    for strategy in strategies(record):
        for at, point in enumerate(record.line(strategy)):
            name = name_of(record, strategy) if at == 0 else ""
            figures = (
                ("",) * 4
                if point.why_not
                else (
                    formatting.milliseconds(point.step_ms),
                    formatting.milliseconds(point.exposed_ms),
                    sent(point.wire_bytes),
                    share(point.efficiency),
                )
            )
            found.append(
                (
                    name,
                    formatting.count(point.devices),
                    *figures,
                    formatting.one_line(point.why_not or point.bound.partition(": ")[0], 80),
                )
            )
    return found


def groups(record: ScaleRecord) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Return the rows grouped by strategy."""
    found: list[tuple[str, list[tuple[str, ...]]]] = []
    for row in rows(record):
        if row[0]:
            found.append((row[0], []))
        found[-1][1].append(row)
    return found


def sentences(record: ScaleRecord) -> list[str]:
    """Return a sentence per strategy on what limits it at the largest number of devices."""
    found = []
    for strategy in strategies(record):
        there = [point for point in record.line(strategy) if point.bound]
        if there:
            found.append(
                formatting.sentence(
                    f"{name_of(record, strategy)} on {formatting.several(there[-1].devices, 'device')}: {there[-1].bound}"
                )
            )
    return found


def sent(wire_bytes: float | None) -> str:
    number = formatting.drawable(wire_bytes)
    return formatting.NOTHING if number is None else f"{formatting.figure(number / 1e6)} MB"


def scale_table(record: ScaleRecord) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in COLUMNS:
        table.add_column(
            name, justify="left" if name in ("", COLUMNS[-1]) else "right", no_wrap=name != COLUMNS[-1]
        )
    for row in rows(record):
        table.add_row(*row)
    return table


def scale_html(record: ScaleRecord) -> str:
    return (
        environment("report.css", "profile.css")
        .get_template("scale.html.j2")
        .render(
            headline=headline(record),
            because=because(record),
            command=formatting.shell(record.command),
            plot=plot(record),
            columns=COLUMNS,
            names=[name_of(record, strategy) for strategy in strategies(record)],
            groups=groups(record),
            sentences=sentences(record),
            notes=[formatting.sentence(note) for note in record.notes[:20]],
            scaling=record.scaling,
            dateline=[
                part
                for part in (formatting.day(record.created), formatting.one_line(record.measured, 200))
                if part
            ],
            version=formatting.one_line(record.flatout, 40),
        )
    )


def plot(record: ScaleRecord) -> tuple[Markup, Markup, Markup] | None:
    """Return the efficiency axis, the plot with a line per strategy, the device axis. None without data."""
    curves = [
        (
            strategy,
            [
                (point, value)
                for point in record.line(strategy)
                if (value := formatting.drawable(point.efficiency)) is not None
            ],
        )
        for strategy in strategies(record)
    ]
    drawn = [(point, value) for _, curve in curves for point, value in curve]
    counts = sorted({point.devices for point, _ in drawn})
    if not counts:
        return None
    x = Scale(counts[0] / 1.05, counts[-1] * 1.05, logarithmic=True)
    y = Scale(0.0, 1.04 * max(1.0, *(value for _, value in drawn)))
    levels = round_ticks(0.0, 1.0)
    every = -(-len(counts) // TICKS)
    marked = [count for at, count in enumerate(counts) if (len(counts) - 1 - at) % every == 0]
    shapes = [*(upright(x, count) for count in marked), *(across(y, t) for t in levels)]
    for at, (strategy, curve) in enumerate(curves):
        if len(curve) > 1:
            shapes.append(
                stretched_line([(point.devices, value) for point, value in curve], x, y, f"curve series-{at}")
            )
        shapes += [_dot(record, strategy, point, value, x, y) for point, value in curve]
    label = "Efficiency against the number of devices: " + "; ".join(
        f"{name_of(record, strategy)} {share(curve[0][1])} on {curve[0][0].devices:,} and {share(curve[-1][1])} on {curve[-1][0].devices:,}"
        for strategy, curve in curves
        if curve
    )
    return (
        axis_beside(y, [(t, f"{100 * t:.0f} %") for t in levels], PLOT_HEIGHT),
        chart(label, PLOT_HEIGHT, shapes, "chart plot"),
        axis_below(x, [(count, f"{count:,}") for count in marked]),
    )


def _dot(record: ScaleRecord, strategy: str, point: ScalePoint, value: float, x: Scale, y: Scale) -> Markup:
    said = title(
        f"{name_of(record, strategy)}, {point.devices:,} devices: {share(value)}, {formatting.milliseconds(point.step_ms)} a step; {point.bound}"
    )
    return element("circle", said, cx=percent(x(point.devices)), cy=percent(1 - y(value)), r=4, class_="dot")
