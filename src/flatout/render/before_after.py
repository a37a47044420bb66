"""Rows that compare the plain program with the tuned one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.render.formatting import (
    NOTHING,
    count,
    drawable,
    duration,
    interval,
    milliseconds,
    one_line,
    per_second,
    size,
    times,
)
from flatout.schema.records import PHASES
from flatout.schema.session import (
    ProgramFigures,
    SessionRecord,
)


@dataclass(frozen=True)
class BeforeAfterRow:
    """One row of the before-and-after table. ``spread`` is the interval of ``change``."""

    what: str
    plain: str
    tuned: str
    change: str = ""
    spread: str = ""


def tuned_side(session: SessionRecord) -> ProgramFigures:
    """Return the figures of the best Plan, or empty figures without a speed-up.

    If no plan was found, the record repeats the plain figures as the best.
    """
    return ProgramFigures() if session.speedup is None else session.best


def before_after(session: SessionRecord) -> list[BeforeAfterRow]:
    a, b = session.baseline, tuned_side(session)
    ratio = session.speedup
    known = ratio if ratio is not None and drawable(ratio.median) is not None else None
    change, spread = (times(known.median), spread_of(known.low, known.high, known.n)) if known else ("", "")
    rows = [
        BeforeAfterRow(
            f"time of a {one_line(a.unit or 'step', 24)}",
            milliseconds(a.step_ms),
            milliseconds(b.step_ms),
            change,
            spread,
        )
    ]
    rows.append(BeforeAfterRow("throughput", per_second(a.samples_per_s), per_second(b.samples_per_s)))
    rows.append(
        BeforeAfterRow(
            "peak memory of the process",
            size(a.peak_memory_bytes),
            size(b.peak_memory_bytes),
            _percent(a.peak_memory_bytes, b.peak_memory_bytes),
        )
    )
    # A warm-up of exactly zero was not measured: the first step of any program is slower than the rest.
    plain, tuned = (
        duration(side.warmup_ms / 1000) if drawable(side.warmup_ms) else NOTHING for side in (a, b)
    )
    rows.append(BeforeAfterRow("warm-up", plain, tuned))
    return [row for row in rows if (row.plain, row.tuned) != (NOTHING, NOTHING)]


def both_sides(rows: list[BeforeAfterRow]) -> bool:
    """Return whether any row has a tuned value."""
    return any(row.tuned != NOTHING for row in rows)


def with_interval(ratio: object, low: object, high: object, n: object, dash: str = "–") -> str:
    """Format a ratio with its interval: ``1.31x (1.28–1.35, n=6)``."""
    inside = spread_of(low, high, n, dash)
    return times(ratio) + (f" ({inside})" if inside else "")


def spread_of(low: object, high: object, n: object, dash: str = "–") -> str:
    pairs = f"n={count(n)}" if drawable(n) else ""
    return ", ".join(part for part in (interval(low, high, dash), pairs) if part)


def _percent(before: object, after: object) -> str:
    a, b = drawable(before), drawable(after)
    if not a or b is None:
        return ""
    change = round(100 * (b - a) / abs(a))
    return f"{change:+,d} %".replace("-", "−") if change else "unchanged"


@dataclass(frozen=True)
class PhasePart:
    """One phase of a step: the milliseconds for the chart, and the median with quartiles for the table."""

    phase: str
    ms: float
    median_ms: float | None
    low_ms: float | None
    high_ms: float | None


def parts(side: ProgramFigures) -> list[PhasePart]:
    """Return the phases in step order. Their chart lengths are shares of the mean step, so they add up."""
    known = [name for name in PHASES if name in side.phases]
    step = drawable(side.step_ms)
    return [
        part
        for name in [*known, *[n for n in side.phases if n not in PHASES][:6]]
        if (part := _part(name, side.phases[name], step))
    ]


def _part(name: str, phase: object, step_ms: float | None) -> PhasePart | None:
    def read(key: str) -> float | None:
        return drawable(phase.get(key) if isinstance(phase, Mapping) else getattr(phase, key, None))

    median = drawable(phase) if isinstance(phase, (int, float)) else read("median_ms")
    share = read("share")
    ms = share * step_ms if share is not None and step_ms is not None else median
    return (
        None
        if ms is None
        else PhasePart(one_line(name, 40), max(0.0, ms), median, read("low_ms"), read("high_ms"))
    )
