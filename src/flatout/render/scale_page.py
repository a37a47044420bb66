"""The page of predictions for many devices, for the terminal and as HTML."""

from flatout.render.formatting import MISSING, count, finite, milliseconds, plural, rounded, sentence, size
from flatout.render.page import Figure, Items, Page, Paragraph, Section, Table, dateline, notes
from flatout.render.plot import Plot, Scale
from flatout.schema.scale import Link, ScaleRecord

NAMES = {"ddp": "DDP", "fsdp": "FSDP", "hybrid": "Hybrid", "local": "Local SGD"}
COLUMNS = ("", ">devices", ">step", ">waiting", ">each sends", ">efficiency", "bound by")
MAX_TICKS = 9  # maximum number of ticks below the chart


def strategies(record: ScaleRecord) -> list[str]:
    return list(dict.fromkeys(point.strategy for point in record.points))


def name_of(record: ScaleRecord, strategy: str) -> str:
    name = NAMES.get(strategy, strategy)
    return f"{name}, H = {record.local_steps}" if strategy == "local" else name


def headline(record: ScaleRecord) -> str:
    """Return the most efficient strategy at the largest number of devices.

    Local SGD is left out unless it is the only strategy, because it changes what is learned."""
    only_local = strategies(record) == ["local"]
    points = [point for point in record.points if only_local or point.strategy != "local"]
    candidates = [(p.devices, p.efficiency, -i) for i, p in enumerate(points) if p.efficiency is not None]
    if not candidates:
        return "No prediction is possible"
    devices, _, i = max(candidates)
    best = points[-i]
    return f"{name_of(record, best.strategy)} on {plural(devices, 'device')}: {100 * (best.efficiency or 0.0):.0f}\u00a0% efficient"


def summary(record: ScaleRecord) -> str:
    timing = record.timing
    step_text = f"one device needs {milliseconds(timing.step_ms)} for a step" if timing else ""
    batch = f" of {rounded(timing.samples)} samples" if timing and timing.samples else ""
    is_weak = record.scaling == "weak"
    kind = "Each device keeps this batch" if is_weak else "This batch is split across the devices"
    return sentence(f"Predicted, not measured: {step_text}{batch}. {kind}. Network: {network(record)}")


def network(record: ScaleRecord) -> str:
    if record.network is None:
        return MISSING
    text = link_text(record.network)
    if record.intra_node_link is None:
        return text
    return f"{text}, {record.devices_per_node} devices a node joined by {link_text(record.intra_node_link)}"


def link_text(link: Link) -> str:
    has_cards = link.nics_per_node and not link.is_intra_node
    cards = f", {plural(link.nics_per_node, 'card')} a node" if has_cards else ""
    return f"{link.name} ({rounded(link.bandwidth_bytes_per_s / 1e9)} GB/s, {rounded(link.latency_us)} us{cards})"


def share(value: float | None) -> str:
    number = finite(value)
    return MISSING if number is None else f"{100 * number:.1f} %"


def rows(record: ScaleRecord) -> list[tuple[str, ...]]:
    """Return a row per point, in the order of ``COLUMNS``.

    The last column shows the text before the colon. ``sentences`` gives the full text."""
    table: list[tuple[str, ...]] = []
    for strategy in strategies(record):
        for point in record.line(strategy):
            times = milliseconds(point.step_ms), milliseconds(point.exposed_ms)
            figures = *times, size(point.wire_bytes), share(point.efficiency)
            why = point.why_not or point.bound.partition(": ")[0]
            shown = ("",) * 4 if point.why_not else figures
            table.append((name_of(record, strategy), count(point.devices), *shown, why))
    return table


def sentences(record: ScaleRecord) -> list[str]:
    """Return a sentence per strategy on what limits it at the largest number of devices."""
    last = {point.strategy: point for point in record.points if point.bound}
    shown = [(name_of(record, name), last[name]) for name in strategies(record) if name in last]
    return [sentence(f"{name} on {plural(p.devices, 'device')}: {p.bound}") for name, p in shown]


def scale_page(record: ScaleRecord) -> Page:
    legend = [(f"c{number}", name_of(record, strategy)) for number, strategy in enumerate(strategies(record))]
    caption = "Samples per second of all devices, relative to the same number of independent devices."
    note = "Waiting is the communication that is not overlapped with computation. The total computation and communication of a device are in scale.json."
    return Page(
        "predicted step on many devices",
        headline(record),
        "scale.json",
        [
            Section(f"Efficiency, {record.scaling} scaling", [Figure(plot(record), caption, legend)]),
            Section(
                "Bottlenecks",
                [Table(COLUMNS, rows(record)), Items(sentences(record)), Paragraph(note, "note")],
            ),
            notes(map(sentence, record.notes), "Assumptions"),
        ],
        summary(record),
        command=record.command,
        dateline=dateline(record.created, record.timing_source),
        version=record.flatout,
    )


def plot(record: ScaleRecord) -> Plot | None:
    """Return the efficiency against the number of devices, with a line per strategy. None without data."""
    lines = []
    for strategy in strategies(record):
        values = [(point, finite(point.efficiency)) for point in record.line(strategy)]
        lines.append((strategy, [(point, value) for point, value in values if value is not None]))
    counts = sorted({point.devices for _, line in lines for point, _ in line})
    if not counts:
        return None
    x = Scale(counts[0] / 1.05, counts[-1] * 1.05, logarithmic=True)
    y = Scale(0.0, 1.04 * max(1.0, *(value for _, line in lines for _, value in line)))
    every = -(-len(counts) // MAX_TICKS)
    ticks = [
        (float(n), f"{n:,}") for number, n in enumerate(counts) if (len(counts) - 1 - number) % every == 0
    ]
    label = "Efficiency against the number of devices: " + "; ".join(
        f"{name_of(record, strategy)} {share(line[0][1])} on {line[0][0].devices:,} and {share(line[-1][1])} on {line[-1][0].devices:,}"
        for strategy, line in lines
        if line
    )
    chart = Plot(label, x, y, ticks, [(t / 4, f"{25 * t} %") for t in range(5)], axis="devices")
    for number, (strategy, line) in enumerate(lines):
        chart.line([(float(point.devices), value) for point, value in line], f"c{number}")
        for point, value in line:
            tip = f"{name_of(record, strategy)}, {point.devices:,} devices: {share(value)}, {milliseconds(point.step_ms)} a step; {point.bound}"
            chart.dot(point.devices, value, f"c{number}", tip, 4)
    return chart
