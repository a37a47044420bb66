"""Charts of a profile: what-ifs, memory over a step and over all steps."""

from __future__ import annotations

from collections.abc import Sequence

from flatout.render.formatting import factor, finite, interval, is_positive, size
from flatout.render.plot import Interval, Plot, intervals
from flatout.render.svg import (
    Scale,
    byte_ticks,
    number_ticks,
    padded_scale,
    ratio_scale,
    ratio_ticks,
)
from flatout.schema.profile import MEMORY_KINDS, MemoryGrowth, MemoryProfile, WhatIf


def what_if_plot(what_ifs: Sequence[WhatIf]) -> Plot | None:
    """Return a row per measured what-if. A full dot marks a certain gain."""
    rows = [
        Interval(
            f"{what_if.name}  {factor(ratio.median)} ({interval(ratio.low, ratio.high)})",
            ratio.median,
            ratio.low,
            ratio.high,
            "kept" if ratio.significant else "dropped",
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


def memory_colour(kind: str) -> str:
    return f"c{MEMORY_KINDS.index(kind)}" if kind in MEMORY_KINDS else "c6"


def memory_plot(memory: MemoryProfile) -> Plot | None:
    """Return the kinds of memory over a step, stacked."""
    points = [(finite(point.ms), point.kinds) for point in memory.timeline]
    samples = [
        (ms, {kind: max(0.0, finite(amount) or 0.0) for kind, amount in kinds.items()})
        for ms, kinds in points
        if ms is not None
    ]
    shown = [kind for kind in MEMORY_KINDS if any(kinds.get(kind) for _, kinds in samples)]
    if len(samples) < 2 or not shown:
        return None
    peak = max(sum(kinds.values()) for _, kinds in samples)
    x, y = Scale(samples[0][0], samples[-1][0]), Scale(0.0, peak * 1.05)
    label = f"Memory over a step: at most {size(peak)}"
    plot = Plot(label, x, y, number_ticks(x, unit=" ms"), byte_ticks(y), axis="of a step", grid=False)
    below = [0.0] * len(samples)
    for kind in shown:
        above = [base + kinds.get(kind, 0.0) for base, (_, kinds) in zip(below, samples, strict=True)]
        area = [(ms, low, high) for (ms, _), low, high in zip(samples, below, above, strict=True)]
        tip = f"{kind}: at most {size(max(kinds.get(kind, 0.0) for _, kinds in samples))}"
        plot.area(area, memory_colour(kind), tip)
        below = above
    return plot


def growth_plot(leak: MemoryGrowth) -> Plot | None:
    """Return memory at the same point of each step."""
    series = [value for v in leak.series if (value := finite(v)) is not None]
    if len(series) < 3:
        return None
    x, y = Scale(1, len(series)), padded_scale(series)
    label = f"Memory at the same point of {len(series)} steps, from {size(series[0])} to {size(series[-1])}"
    plot = Plot(label, x, y, number_ticks(x), byte_ticks(y), 150, "step")
    plot.line(
        [(float(step), value) for step, value in enumerate(series, 1)], "bad" if leak.leaking else "plain"
    )
    return plot
