"""The phases of a step, as bars on one scale and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.render.formatting import MISSING, finite, milliseconds, rounded
from flatout.render.page import Cell, Figure, Section, Table
from flatout.render.plot import Segment, bars
from flatout.schema.records import PHASES, PhaseTime

MAX_UNKNOWN_PHASES = 6  # phases that flatout does not know


@dataclass(frozen=True)
class ProgramPhases:
    """The phases of one program. ``step_ms`` is its mean step."""

    name: str
    phases: Mapping[str, PhaseTime]
    step_ms: float | None

    @classmethod
    def read(cls, name: str, phases: Mapping[str, Any], step_ms: object) -> ProgramPhases:
        """Take the phases that can be drawn, in the order of a step. A stored record holds mappings."""
        unknown = [phase for phase in phases if phase not in PHASES][:MAX_UNKNOWN_PHASES]
        known = {}
        for phase in [*(phase for phase in PHASES if phase in phases), *unknown]:
            stored = phases[phase]
            fields = stored if isinstance(stored, Mapping) else getattr(stored, "__dict__", {})
            values = [finite(fields.get(key)) for key in ("median_ms", "low_ms", "high_ms", "share")]
            if values[0] is not None:
                median, low, high, share = (value or 0.0 for value in values)
                known[phase] = PhaseTime(median, low, high, share)
        return cls(name, known, finite(step_ms))

    @property
    def segments(self) -> list[Segment]:
        """The lengths are shares of the mean step, so they add up."""
        step = self.step_ms or sum(time.median_ms for time in self.phases.values())
        segments = []
        for name, time in self.phases.items():
            if time.share > 0:
                tip = f"{name}: {milliseconds(time.median_ms)}, {100 * time.share:.0f} % of the step"
                segments.append(Segment(name, max(0.0, time.share * step), phase_kind(name), tip))
        return segments


def phase_kind(phase: str) -> str:
    return phase if phase in PHASES else "other"


def phase_figure(sides: Sequence[ProgramPhases], unit: str = "step") -> Figure:
    rows, labels = [], []
    for side in sides:
        if segments := side.segments:
            total = milliseconds(sum(segment.value for segment in segments))
            rows.append((f"{side.name}: {total}" if len(sides) > 1 else "", segments))
            tips = ", ".join(segment.tip.partition(",")[0] for segment in segments)
            labels.append(f"{side.name} {tips}".strip())
    scale = ", on one scale" if len(rows) > 1 else ""
    chart = bars(f"Phases of a {unit}: {'; '.join(labels)}", rows)
    return Figure(chart, f"Lengths are shares of the mean {unit}{scale}.")


def phase_section(
    title: str, sides: Sequence[ProgramPhases], changes: Mapping[str, str], where: str, unit: str = "step"
) -> Section:
    """Return the bars, and a table with the median and the quartiles of each phase."""
    drawn = [side for side in sides if side.phases]
    names = dict.fromkeys(name for side in drawn for name, time in side.phases.items() if time.median_ms)
    columns = ["phase", *(f">{side.name}" for side in drawn), *(["change"] if len(drawn) > 1 else [])]
    rows = [
        [
            Cell(name, kind=phase_kind(name)),
            *(_median(side.phases.get(name)) for side in drawn),
            *([changes.get(name, "")] if len(drawn) > 1 else []),
        ]
        for name in names
    ]
    return Section(title, [phase_figure(drawn, unit), Table(columns, rows)], where)


def _median(time: PhaseTime | None) -> str | Cell:
    if time is None:
        return MISSING
    return Cell(milliseconds(time.median_ms), f"{rounded(time.low_ms)}–{rounded(time.high_ms)}")
