"""Render `flatout compare`: headline, tables for the terminal, and the page with its charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from flatout.render.before_after import PhasePart
from flatout.render.charts import loss_plot, step_bars
from flatout.render.curves import loss_curves
from flatout.render.formatting import (
    NOTHING,
    day,
    drawable,
    duration,
    milliseconds,
    one_line,
    per_second,
    sentence,
    several,
    shell,
    signed,
    size,
)
from flatout.render.page import environment
from flatout.render.svg import Scale, chart, element, percent, round_ticks, title
from flatout.schema.compare import Change, CompareRecord, SideRecord
from flatout.schema.records import PHASES, PhaseTime

Row = tuple[str, str, str, str]
DOTS_HEIGHT = 96
WIDEST = 10.0  # a share; an interval beyond it says nothing
GATE_STATUS = {"passed": "applied", "failed": "rejected", "cannot tell": "skipped"}
LOSS_STATUS = {"same bits": "same", "within the spread": "equivalent", "different": "failed"}


def headline(record: CompareRecord) -> str:
    """Say in one line whether B is faster or slower, with the interval."""
    return change_sentence(record.step_time, _unit(record))


def change_sentence(seen: Change | None, unit: str) -> str:
    """Say in one line how the step time of B differs from that of A, with the interval."""
    if seen is None or drawable(seen.value) is None:
        return "Nothing was compared"
    inside = f"({_ends(seen)}, n={seen.n})"
    if not seen.certain:
        return f"No difference in step time beyond the noise {inside}"
    return (
        f"B is {'slower' if seen.value > 0 else 'faster'}: {change_text(seen.value)} time per {unit} {inside}"
    )


def change_text(share: float) -> str:
    """Format a share: ``+5.1 %``."""
    value = drawable(share)
    if value is None:
        return NOTHING
    return f"{signed(100 * value, 0 if abs(value) >= 1 else 1)} %"


def _unit(record: CompareRecord) -> str:
    return one_line(record.b.unit if record.b is not None else "step", 24)


def _with_interval(seen: Change | None) -> str:
    """Format a change with its interval: ``+5.1 % (+4.2 to +6.0)``."""
    if seen is None:
        return ""
    return change_text(seen.value) + (f" ({ends})" if (ends := _ends(seen)) else "")


def _ends(seen: Change) -> str:
    if drawable(seen.high) is None or seen.high > WIDEST:
        return "too few pairs for an interval"
    low, high = change_text(seen.low), change_text(seen.high)
    return "" if NOTHING in (low, high) else f"{low.removesuffix(' %')} to {high.removesuffix(' %')}"


def rows(record: CompareRecord) -> list[Row]:
    """Return rows of name, A, B and change."""
    a, b = _sides(record)
    found: list[Row] = [
        (
            f"time of a {_unit(record)}",
            milliseconds(a.step_ms),
            milliseconds(b.step_ms),
            _with_interval(record.step_time),
        ),
        ("throughput", per_second(a.samples_per_s), per_second(b.samples_per_s), ""),
        (
            "start-up, until steady",
            duration(a.start_s),
            duration(b.start_s),
            _with_interval(record.start),
        ),
        (
            "peak memory",
            size(a.peak_memory_bytes),
            size(b.peak_memory_bytes),
            _with_interval(record.memory),
        ),
        *(
            (name, a.versions.get(name, NOTHING), b.versions.get(name, NOTHING), "")
            for name in _unlike_versions(a, b)
        ),
    ]
    return [row for row in found if row[1:3] != (NOTHING, NOTHING)]


def _unlike_versions(a: SideRecord, b: SideRecord) -> list[str]:
    return [
        name for name in sorted({*a.versions, *b.versions}) if a.versions.get(name) != b.versions.get(name)
    ]


def phase_rows(record: CompareRecord) -> list[Row]:
    """Return rows of phase, A, B and the difference in milliseconds."""
    a, b = _sides(record)
    found = []
    for name in PHASES:
        if any(name in side.phases and side.phases[name].median_ms for side in (a, b)):
            apart = record.phases_ms.get(name)
            said = (
                f"{signed(apart[0], 2)} ms ({signed(apart[1], 2)} to {signed(apart[2], 2)})" if apart else ""
            )
            found.append((name, _phase(a.phases.get(name)), _phase(b.phases.get(name)), said))
    return found


def _phase(phase: PhaseTime | None) -> str:
    return milliseconds(phase.median_ms) if phase is not None else NOTHING


def _sides(record: CompareRecord) -> tuple[SideRecord, SideRecord]:
    assert record.a is not None
    assert record.b is not None
    return record.a, record.b


def tables(record: CompareRecord) -> list[Any]:
    """Return the terminal's tables and lines."""
    a, b = _sides(record)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name, align in (("", "left"), ("A", "right"), ("B", "right"), ("change", "left")):
        table.add_column(name, justify=align)  # type: ignore[arg-type]
    for row in [*rows(record), *phase_rows(record)]:
        table.add_row(*map(Text, row))
    names = Text("\n".join(f"{name}: {one_line(side.label, 160)}" for name, side in (("A", a), ("B", b))))
    found: list[Any] = [
        names,
        table,
        Text(f"\nlosses: {record.losses.verdict}: {sentence(record.losses.why)}"),
    ]
    for gate in record.gates:
        style = {"failed": "bold red", "passed": "green"}.get(gate.verdict, "")
        found.append(Text(f"gate on {gate.name}: {gate.verdict}: {sentence(gate.why)}", style=style))
    return found


def compare_html(record: CompareRecord) -> str:
    a, b = _sides(record)
    seen = record.step_time
    failed = record.gate_failed
    curves = loss_curves(*_loss_curves(a, b))
    return (
        environment("report.css")
        .get_template("compare.html.j2")
        .render(
            headline=headline(record),
            tone="failed"
            if failed or (seen is not None and seen.low > 0)
            else "faster"
            if seen is not None and seen.high < 0
            else "",
            a=_described(a),
            b=_described(b),
            rows=rows(record),
            phases=phase_rows(record),
            dots=pairs_chart(record),
            pairs=several(len(record.pairs), "pair"),
            bars=step_bars(_parts(a), _parts(b), ("A", "B")),
            losses=record.losses,
            losses_status=LOSS_STATUS.get(record.losses.verdict, "open"),
            plot=loss_plot(curves, ("A", "B")) if curves is not None else None,
            gates=[(gate, GATE_STATUS.get(gate.verdict, "other")) for gate in record.gates],
            notes=[sentence(note) for note in record.notes[:20]],
            against=one_line(record.against, 80),
            dateline=[
                part
                for part in (
                    day(record.created),
                    one_line(record.machine.get("machine", ""), 120),
                    record.device,
                    f"{several(b.processes, 'process')} of B",
                    f"measured in {duration(record.seconds)}",
                )
                if part
            ],
            version=one_line(record.flatout, 40),
        )
    )


def _described(side: SideRecord) -> dict[str, str]:
    return {
        "label": one_line(side.label, 120),
        "command": shell(side.command),
        "revision": one_line(side.revision, 40),
    }


def _loss_curves(a: SideRecord, b: SideRecord) -> tuple[list[list[float]], list[list[float]]]:
    seeds = [seed for seed in a.losses if seed in b.losses]
    cut = [min(len(a.losses[seed]), len(b.losses[seed])) for seed in seeds]
    return (
        [a.losses[seed][:n] for seed, n in zip(seeds, cut, strict=True)],
        [b.losses[seed][:n] for seed, n in zip(seeds, cut, strict=True)],
    )


def _parts(side: SideRecord) -> list[PhasePart]:
    """Return the phases; their lengths are shares of the mean step, so they add up."""
    step = drawable(side.step_ms) or 0.0
    return [
        PhasePart(name, max(0.0, phase.share * step), phase.median_ms, phase.low_ms, phase.high_ms)
        for name in PHASES
        if (phase := side.phases.get(name)) is not None and drawable(phase.share) is not None
    ]


def pairs_chart(record: CompareRecord) -> Markup | None:
    """Return a dot per pair of processes, and the mean with its interval below; None without pairs."""
    seen = record.step_time
    values = [100 * value for value in map(drawable, record.pairs) if value is not None]
    if seen is None or not values:
        return None
    ends = [100 * end for end in (seen.low, seen.high) if drawable(end) is not None and abs(end) < 10]
    reach = max([*map(abs, values), *map(abs, ends), 1.0]) * 1.15
    x = Scale(-reach, reach)
    shapes = [
        element("line", x1=percent(x(tick)), x2=percent(x(tick)), y1=0, y2=DOTS_HEIGHT - 24, class_="grid")
        for tick in round_ticks(x.low, x.high)
    ]
    shapes.append(
        element("line", x1=percent(x(0)), x2=percent(x(0)), y1=0, y2=DOTS_HEIGHT - 24, class_="unity")
    )
    shapes += [
        element(
            "circle",
            title(f"pair {at + 1}: {change_text(value / 100)}"),
            cx=percent(x(value)),
            cy=14 + 7 * (at % 3),
            r=4.5,
            class_="mark",
        )
        for at, value in enumerate(values)
    ]
    if len(ends) == 2:
        shapes.append(
            element(
                "line", x1=percent(x(ends[0])), x2=percent(x(ends[1])), y1=54, y2=54, class_="whisker total"
            )
        )
    shapes.append(
        element(
            "circle",
            title(_with_interval(seen)),
            cx=percent(x(100 * seen.value)),
            cy=54,
            r=6.5,
            class_="mark total",
        )
    )
    shapes += _axis(x)
    return chart(
        f"Change of the step time from A to B: {_with_interval(seen)}; each dot is a pair of processes",
        DOTS_HEIGHT,
        shapes,
    )


def _axis(x: Scale) -> Sequence[Markup]:
    return [
        element(
            "text",
            f"{signed(tick, 1 if x.high < 5 else 0)} %",
            x=percent(x(tick)),
            y=DOTS_HEIGHT - 6,
            text_anchor="middle",
            class_="label soft",
        )
        for tick in round_ticks(x.low, x.high)
        if 0.03 < x(tick) < 0.97
    ]
