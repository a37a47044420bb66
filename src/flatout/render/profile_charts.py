"""Charts of a profile: what-ifs, roofline, memory over a step and over all steps, work beside the steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from flatout.render.formatting import drawable, interval, is_positive, milliseconds, several, size, times
from flatout.render.page import Figure
from flatout.render.plot import Interval, Part, Plot, bars, intervals
from flatout.render.svg import (
    Scale,
    byte_ticks,
    decades,
    number_ticks,
    powers,
    ratio_scale,
    ratio_ticks,
    with_room,
)
from flatout.schema.profile import MEMORY_KINDS, MemoryGrowth, MemorySeen, Operation, ProfileRecord, WhatIf

LARGEST_DOT, SMALLEST_DOT = 13.0, 3.5
MOST_DOTS, MOST_NUMBERS = 24, 6
LIMITS = {"compute": "c0", "memory": "c3", "launch": "c4", "unknown": "c6"}


def what_if_plot(what_ifs: Sequence[WhatIf]) -> Plot | None:
    """Return a row per measured what-if. A full dot marks a certain gain."""
    rows = [
        Interval(
            f"{what_if.name}  {times(ratio.median)} ({interval(ratio.low, ratio.high)})",
            ratio.median,
            ratio.low,
            ratio.high,
            "kept" if ratio.certain else "dropped",
        )
        for what_if in what_ifs
        if (ratio := what_if.ratio) is not None
        and all(map(is_positive, (ratio.median, ratio.low, ratio.high)))
    ]
    if not rows:
        return None
    rows.sort(key=lambda row: -row.value)
    scale = ratio_scale([v for row in rows for v in (row.value, row.low, row.high) if v is not None])
    ticks = [(tick, f"{tick:g}x") for tick in ratio_ticks(scale)]
    return intervals("What-ifs: " + "; ".join(row.text for row in rows), rows, scale, ticks, 1.0)


def roofline(profile: ProfileRecord) -> tuple[Figure, list[Operation]] | None:
    """Return achieved FLOP/s against FLOPs per byte, and the operations shown, largest first.

    The roof is the measured memory bandwidth, then the measured peak of matrix products.
    """
    dots = [
        (operation, *place)
        for operation in sorted(profile.operations, key=lambda operation: -operation.share)
        if (place := _place(operation)) is not None
    ][:MOST_DOTS]
    if not dots:
        return None
    ceilings = {name: value for name, v in profile.ceilings.items() if (value := drawable(v))}
    bandwidth = ceilings.get("memory_bytes_per_s", 0.0)
    peak = max((value for name, value in ceilings.items() if name.startswith("matmul_")), default=0.0)
    roofed = bandwidth > 0 and peak > 0
    xs, ys = [x for _, x, _ in dots], [y for _, _, y in dots]
    x = decades([*xs, *([peak / bandwidth * 3] if roofed else [])])
    y = decades([*ys, *([peak * 1.4] if roofed else [])])
    label = f"Roofline: {len(dots)} operations by FLOPs a byte and FLOPs a second"
    plot = Plot(
        label,
        x,
        y,
        [(t, f"{t:g}") for t in powers(x)],
        [(t, flops(t)) for t in powers(y)],
        axis="FLOPs a byte",
    )
    if roofed:
        corners = sorted({max(x.low, y.low / bandwidth), peak / bandwidth, x.high})
        plot.line([(i, min(peak, bandwidth * i)) for i in corners if x.low <= i <= x.high], "ink")
    for number, (operation, i, speed) in reversed(list(enumerate(dots, 1))):
        tip = (
            f"{operation.name}: {100 * operation.share:.0f} % of the time, {flops(speed)}{reached(operation)}"
        )
        radius = max(SMALLEST_DOT, LARGEST_DOT * math.sqrt(min(1.0, max(0.0, operation.share))))
        plot.dot(
            i,
            speed,
            LIMITS[_limit(operation)],
            tip,
            radius,
            text=str(number) if number <= MOST_NUMBERS else "",
        )
    roof = (
        "The line is the possible speed: the measured limits of this machine's memory and arithmetic."
        if roofed
        else "The possible speed is unknown; to measure it, run `flatout doctor --bench`."
    )
    shown = [operation for operation, _, _ in dots]
    legend = [
        (kind, "limit not known" if limit == "unknown" else f"{limit}-bound")
        for limit, kind in LIMITS.items()
        if limit in map(_limit, shown)
    ]
    caption = (
        f"Each dot is an operation; its size is its share of the time. {roof} The numbers refer to the table."
    )
    return Figure(plot, caption, legend), shown


def _limit(operation: Operation) -> str:
    return operation.limit if operation.limit in LIMITS else "unknown"


def _place(operation: Operation) -> tuple[float, float] | None:
    """Return FLOPs a byte and the achieved FLOP/s."""
    ms = operation.device_ms if operation.device_ms is not None else operation.host_ms
    values = [drawable(value) for value in (operation.flops, operation.moved_bytes, ms)]
    if any(value is None or value <= 0 for value in values):
        return None
    count, moved, time = (value or 1.0 for value in values)
    return count / moved, count / time * 1000


def reached(operation: Operation) -> str:
    """Return the end of a phrase: the share of the possible speed; empty if it is unknown."""
    return (
        f", {100 * operation.roofline:.0f} % of the possible speed" if operation.roofline is not None else ""
    )


def flops(value: float) -> str:
    power, name = next(
        ((p, n) for p, n in ((12, "T"), (9, "G"), (6, "M"), (3, "k")) if value >= 10**p), (0, "")
    )
    return f"{value / 10**power:.3g} {name}FLOP/s"


def memory_colour(kind: str) -> str:
    return f"c{MEMORY_KINDS.index(kind)}" if kind in MEMORY_KINDS else "c6"


def peak_figure(memory: MemorySeen) -> Figure:
    """Return the contents of the peak as one stacked bar."""
    total = sum(amount for amount in memory.at_peak.values() if amount > 0) or 1
    shown = {
        kind: f"{kind}: {size(amount)}, {100 * amount / total:.0f} %"
        for kind, amount in sorted(memory.at_peak.items(), key=lambda part: -part[1])
        if amount > 0
    }
    parts = [Part(kind, memory.at_peak[kind], memory_colour(kind), tip) for kind, tip in shown.items()]
    chart = bars("What fills the peak: " + "; ".join(shown.values()), [("", parts)])
    return Figure(chart, "What fills the peak.", [(memory_colour(kind), tip) for kind, tip in shown.items()])


def memory_plot(memory: MemorySeen) -> Plot | None:
    """Return the kinds of memory over a step, stacked."""
    times = [(drawable(point.ms), point.kinds) for point in memory.timeline]
    line = [
        (ms, {kind: max(0.0, drawable(amount) or 0.0) for kind, amount in kinds.items()})
        for ms, kinds in times
        if ms is not None
    ]
    shown = [kind for kind in MEMORY_KINDS if any(kinds.get(kind) for _, kinds in line)]
    if len(line) < 2 or not shown:
        return None
    most = max(sum(kinds.values()) for _, kinds in line)
    x, y = Scale(line[0][0], line[-1][0]), Scale(0.0, most * 1.05)
    label = f"Memory over a step: at most {size(most)}"
    plot = Plot(label, x, y, number_ticks(x, unit=" ms"), byte_ticks(y), axis="of a step", grid=False)
    below = [0.0] * len(line)
    for kind in shown:
        above = [base + kinds.get(kind, 0.0) for base, (_, kinds) in zip(below, line, strict=True)]
        area = [(ms, low, high) for (ms, _), low, high in zip(line, below, above, strict=True)]
        tip = f"{kind}: at most {size(max(kinds.get(kind, 0.0) for _, kinds in line))}"
        plot.area(area, memory_colour(kind), tip)
        below = above
    return plot


def growth_plot(leak: MemoryGrowth) -> Plot | None:
    """Return memory at the same point of each step."""
    series = [value for v in leak.series if (value := drawable(v)) is not None]
    if len(series) < 3:
        return None
    x, y = Scale(1, len(series)), with_room(series)
    label = f"Memory at the same point of {len(series)} steps, from {size(series[0])} to {size(series[-1])}"
    plot = Plot(label, x, y, number_ticks(x), byte_ticks(y), 150, "step")
    plot.line(
        [(float(step), value) for step, value in enumerate(series, 1)], "bad" if leak.leaking else "plain"
    )
    return plot


def parallel_work(profile: ProfileRecord) -> Iterator[tuple[str, float, str]]:
    """Yield the work that overlaps with the phases: its name, its ms a step, and a sentence."""
    for loader in profile.loaders:
        if loader.workers and loader.fetch_ms and drawable(loader.fetch_ms):
            ms = loader.fetch_ms / loader.workers
            hidden = max(0.0, ms - loader.wait_ms)
            yield (
                several(loader.workers, "loader worker"),
                ms,
                f"{milliseconds(ms)} a step; a batch takes {milliseconds(loader.fetch_ms)}; "
                f"{milliseconds(loader.wait_ms)} waited for, {milliseconds(hidden)} hidden",
            )
    device = {kind: ms for kind, ms in profile.device_ms.items() if ms > 0 and drawable(ms)}
    busy = profile.step_ms - profile.idle_ms if profile.step_ms and profile.idle_ms is not None else None
    overlap = max(0.0, sum(device.values()) - busy) if busy is not None else 0.0
    for kind, ms in device.items():
        overlapping = (
            f"; {milliseconds(overlap)} on the device overlap" if overlap and kind == "computing" else ""
        )
        yield f"device, {kind}", ms, f"{milliseconds(ms)} a step{overlapping}"


def parallel_plot(profile: ProfileRecord) -> Plot | None:
    """Return a bar for each, on the scale of the mean step."""
    rows = [
        (f"{name}: {words}", [Part("", min(ms, profile.mean_step_ms or ms), "c5", words)])
        for name, ms, words in parallel_work(profile)
    ]
    label = "Beside the step: " + ". ".join(name for name, _ in rows)
    return bars(label, rows, profile.mean_step_ms) if rows else None
