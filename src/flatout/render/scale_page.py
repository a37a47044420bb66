"""The page of predictions for many devices, for the terminal and as HTML."""

from flatout.render import formatting
from flatout.render.page import Figure, Items, Page, Section, Table, Words, dateline, notes
from flatout.render.plot import Plot
from flatout.render.svg import Scale
from flatout.schema.scale import Link, ScaleRecord

NAMES = {"ddp": "DDP", "fsdp": "FSDP", "hybrid": "Hybrid", "local": "Local SGD"}
COLUMNS = ("", ">devices", ">step", ">waiting", ">each sends", ">efficiency", "bound by")
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
    return f"{link.name} ({formatting.figure(link.bandwidth_bytes_per_s / 1e9)} GB/s, {formatting.figure(link.latency_us)} us{cards})"


def share(value: float | None) -> str:
    number = formatting.drawable(value)
    return formatting.NOTHING if number is None else f"{100 * number:.1f} %"


def rows(record: ScaleRecord) -> list[tuple[str, ...]]:
    """Return a row per point, in the order of ``COLUMNS``.

    The last column shows the text before the colon. ``sentences`` gives the full text.
    """
    table: list[tuple[str, ...]] = []
    for strategy in strategies(record):
        for point in record.line(strategy):
            figures = (
                ("",) * 4
                if point.why_not
                else (
                    formatting.milliseconds(point.step_ms),
                    formatting.milliseconds(point.exposed_ms),
                    formatting.size(point.wire_bytes),
                    share(point.efficiency),
                )
            )
            table.append(
                (
                    name_of(record, strategy),
                    formatting.count(point.devices),
                    *figures,
                    point.why_not or point.bound.partition(": ")[0],
                )
            )
    return table


def sentences(record: ScaleRecord) -> list[str]:
    """Return a sentence per strategy on what limits it at the largest number of devices."""
    table = []
    for strategy in strategies(record):
        there = [point for point in record.line(strategy) if point.bound]
        if there:
            table.append(
                formatting.sentence(
                    f"{name_of(record, strategy)} on {formatting.several(there[-1].devices, 'device')}: {there[-1].bound}"
                )
            )
    return table


def scale_page(record: ScaleRecord) -> Page:
    legend = [(f"c{at}", name_of(record, strategy)) for at, strategy in enumerate(strategies(record))]
    caption = "Samples per second of all devices, relative to the same number of independent devices."
    note = "Waiting is the communication that is not overlapped with computation. The total computation and communication of a device are in scale.json."
    return Page(
        "predicted step on many devices",
        headline(record),
        "scale.json",
        [
            Section(f"Efficiency, {record.scaling} scaling", [Figure(plot(record), caption, legend)]),
            Section(
                "Bottlenecks", [Table(COLUMNS, rows(record)), Items(sentences(record)), Words(note, "note")]
            ),
            notes(map(formatting.sentence, record.notes), "Assumptions"),
        ],
        because(record),
        command=record.command,
        dateline=dateline(record.created, record.measured),
        version=record.flatout,
    )


def plot(record: ScaleRecord) -> Plot | None:
    """Return the efficiency against the number of devices, with a line per strategy. None without data."""
    lines = [
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
    counts = sorted({point.devices for _, line in lines for point, _ in line})
    if not counts:
        return None
    x = Scale(counts[0] / 1.05, counts[-1] * 1.05, logarithmic=True)
    y = Scale(0.0, 1.04 * max(1.0, *(value for _, line in lines for _, value in line)))
    every = -(-len(counts) // TICKS)
    ticks = [(float(n), f"{n:,}") for at, n in enumerate(counts) if (len(counts) - 1 - at) % every == 0]
    label = "Efficiency against the number of devices: " + "; ".join(
        f"{name_of(record, strategy)} {share(line[0][1])} on {line[0][0].devices:,} and {share(line[-1][1])} on {line[-1][0].devices:,}"
        for strategy, line in lines
        if line
    )
    drawn = Plot(label, x, y, ticks, [(t / 4, f"{25 * t} %") for t in range(5)], axis="devices")
    for at, (strategy, line) in enumerate(lines):
        drawn.line([(float(point.devices), value) for point, value in line], f"c{at}")
        for point, value in line:
            tip = f"{name_of(record, strategy)}, {point.devices:,} devices: {share(value)}, {formatting.milliseconds(point.step_ms)} a step; {point.bound}"
            drawn.dot(point.devices, value, f"c{at}", tip, 4)
    return drawn
