"""The phases of a step, as bars on one scale and as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.render.formatting import NOTHING, drawable, figure, milliseconds
from flatout.render.page import Cell, Figure, Section, Table
from flatout.render.plot import Part, bars
from flatout.schema.records import PHASES, PhaseTime

MOST_OTHERS = 6  # phases that flatout does not know


@dataclass(frozen=True)
class Side:
    """The phases of one program. ``step_ms`` is its mean step."""

    name: str
    phases: Mapping[str, PhaseTime]
    step_ms: float | None

    @classmethod
    def read(cls, name: str, phases: Mapping[str, Any], step_ms: object) -> Side:
        """Take the phases that can be drawn, in the order of a step. A stored record holds mappings."""
        others = [phase for phase in phases if phase not in PHASES][:MOST_OTHERS]
        known = {}
        for phase in [*(phase for phase in PHASES if phase in phases), *others]:
            stored = phases[phase]
            fields = stored if isinstance(stored, Mapping) else getattr(stored, "__dict__", {})
            values = [drawable(fields.get(key)) for key in ("median_ms", "low_ms", "high_ms", "share")]
            if values[0] is not None:
                median, low, high, share = (value or 0.0 for value in values)
                known[phase] = PhaseTime(median, low, high, share)
        return cls(name, known, drawable(step_ms))

    @property
    def parts(self) -> list[Part]:
        """The lengths are shares of the mean step, so they add up."""
        step = self.step_ms or sum(time.median_ms for time in self.phases.values())
        return [
            Part(
                name,
                max(0.0, time.share * step),
                kind_of(name),
                f"{name}: {milliseconds(time.median_ms)}, {100 * time.share:.0f} % of the step",
            )
            for name, time in self.phases.items()
            if time.share > 0
        ]


def kind_of(phase: str) -> str:
    return phase if phase in PHASES else "other"


def phase_figure(sides: Sequence[Side], unit: str = "step") -> Figure:
    drawn = [side for side in sides if side.parts]
    rows = [
        (
            f"{side.name}: {milliseconds(sum(part.value for part in side.parts))}" if len(sides) > 1 else "",
            side.parts,
        )
        for side in drawn
    ]
    label = "; ".join(
        f"{side.name} {', '.join(part.tip.partition(',')[0] for part in side.parts)}".strip()
        for side in drawn
    )
    scale = ", on one scale" if len(drawn) > 1 else ""
    return Figure(
        bars(f"Phases of a {unit}: {label}", rows), f"Lengths are shares of the mean {unit}{scale}."
    )


def phase_section(
    title: str, sides: Sequence[Side], changes: Mapping[str, str], where: str, unit: str = "step"
) -> Section:
    """Return the bars, and a table with the median and the quartiles of each phase."""
    shown = [side for side in sides if side.phases]
    names = dict.fromkeys(name for side in shown for name, time in side.phases.items() if time.median_ms)
    columns = ["phase", *(f">{side.name}" for side in shown), *(["change"] if len(shown) > 1 else [])]
    rows = [
        [
            Cell(name, kind=kind_of(name)),
            *(_median(side.phases.get(name)) for side in shown),
            *([changes.get(name, "")] if len(shown) > 1 else []),
        ]
        for name in names
    ]
    return Section(title, [phase_figure(shown, unit), Table(columns, rows)], where)


def _median(time: PhaseTime | None) -> str | Cell:
    if time is None:
        return NOTHING
    return Cell(milliseconds(time.median_ms), f"{figure(time.low_ms)}–{figure(time.high_ms)}")


def differences(first: Side, second: Side) -> Iterable[tuple[str, float]]:
    """Yield the change of the median of each phase that both have, in milliseconds."""
    for name, time in first.phases.items():
        if name in second.phases:
            yield name, second.phases[name].median_ms - time.median_ms
