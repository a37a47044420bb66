"""Charts of the memory of a step: what fills it, its peak, its growth."""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from flatout.render.charts import PLOT_HEIGHT
from flatout.render.formatting import drawable, figure, size
from flatout.render.svg import (
    Scale,
    across,
    axis_below,
    axis_beside,
    chart,
    corner,
    element,
    percent,
    round_ticks,
    stretched,
    stretched_line,
    title,
)
from flatout.schema.profile import MEMORY_KINDS, MemoryGrowth, MemorySeen


def kind_class(kind: str) -> str:
    return f"kind-{MEMORY_KINDS.index(kind)}" if kind in MEMORY_KINDS else "kind-6"


def memory_areas(memory: MemorySeen) -> tuple[Markup, Markup, Markup, list[str]] | None:
    """Return the axis of bytes, the stacked areas over a step, the time axis, and the kinds bottom-up."""
    line = [at for at in memory.timeline if drawable(at.ms) is not None]
    kinds = [kind for kind in MEMORY_KINDS if any(at.kinds.get(kind, 0) > 0 for at in line)]
    if len(line) < 2 or not kinds:
        return None
    totals = [sum(max(0, at.kinds.get(kind, 0)) for kind in kinds) for at in line]
    x, y = Scale(line[0].ms, line[-1].ms), Scale(0.0, max(totals) * 1.05)
    below, areas = [0.0] * len(line), []
    for kind in kinds:
        above = [base + max(0, at.kinds.get(kind, 0)) for base, at in zip(below, line, strict=True)]
        there = [corner(x(at.ms), y(value)) for at, value in zip(line, above, strict=True)]
        back = [corner(x(at.ms), y(value)) for at, value in reversed(list(zip(line, below, strict=True)))]
        areas.append(
            element(
                "path",
                title(f"{kind}: at most {size(max(at.kinds.get(kind, 0) for at in line))}"),
                d="M" + " L".join([*there, *back]) + " Z",
                class_=f"area {kind_class(kind)}",
            )
        )
        below = above
    left, grid = byte_levels(y, PLOT_HEIGHT)
    plot = chart(
        f"Memory over a step: at most {size(max(totals))}",
        PLOT_HEIGHT,
        [stretched(areas), *grid],
        "chart plot",
    )
    return left, plot, axis_below(x, [(t, f"{figure(t)} ms") for t in round_ticks(x.low, x.high, 4)]), kinds


def byte_levels(y: Scale, height: int) -> tuple[Markup, list[Markup]]:
    unit = next((power for power in (3, 2, 1) if y.high >= 1024**power), 0)
    levels = [
        tick * 1024**unit
        for tick in round_ticks(y.low / 1024**unit, y.high / 1024**unit, height // 75)
        if 0.03 < y(tick * 1024**unit) < 0.97
    ]
    left = axis_beside(y, [(at, size(at)) for at in levels], height)
    return left, [across(y, at, "grid over") for at in levels]


def peak_bar(memory: MemorySeen) -> Markup | None:
    """Return the contents of the peak as one stacked bar."""
    parts = [(kind, amount) for kind, amount in memory.at_peak.items() if amount > 0]
    total = sum(amount for _, amount in parts)
    if total <= 0:
        return None
    place, shapes = 0.0, []
    for kind, amount in parts:
        shapes.append(
            element(
                "rect",
                title(f"{kind}: {size(amount)}"),
                x=percent(place),
                y=0,
                width=percent(amount / total),
                height=30,
                class_=f"phase {kind_class(kind)}",
            )
        )
        place += amount / total
    return chart(
        "What fills the peak: " + ", ".join(f"{kind} {size(amount)}" for kind, amount in parts), 34, shapes
    )


def growth_line(leak: MemoryGrowth) -> tuple[Markup, Markup] | None:
    """Return the axis of bytes, and the chart of memory at the same point of each step."""
    series = [value for v in leak.series if (value := drawable(v)) is not None]
    if len(series) < 3:
        return None
    low, high = min(series), max(series)
    margin = (high - low) * 0.1 or abs(high) * 0.05 or 1.0
    x, y = Scale(0, len(series) - 1), Scale(low - margin, high + margin)
    left, grid = byte_levels(y, PLOT_HEIGHT // 2)
    drawn = stretched_line(enumerate(series), x, y, "curve " + ("leaking" if leak.leaking else "steady"))
    label = f"Memory at the same point of {len(series)} steps, from {size(series[0])} to {size(series[-1])}"
    return left, chart(label, PLOT_HEIGHT // 2, [*grid, drawn], "chart plot half")


def kinds_present(memory: MemorySeen) -> Iterator[tuple[str, str, str]]:
    """Yield each kind, its CSS class and its share of the peak, largest first."""
    total = sum(amount for amount in memory.at_peak.values() if amount > 0) or 1
    for kind, amount in sorted(memory.at_peak.items(), key=lambda part: -part[1]):
        if amount > 0:
            yield kind, kind_class(kind), f"{size(amount)}, {100 * amount / total:.0f} %"
