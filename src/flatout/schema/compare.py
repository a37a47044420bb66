"""The record of `flatout compare`: two programs, how they differ, the gates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from flatout.schema.findings import SourceLocation
from flatout.schema.records import PhaseTime, ProgramRecord, Record

SCHEMA = 1


@dataclass
class Change(Record):
    """By which share B differs from A: 0.05 means 5 % more. The interval has the level ``CONFIDENCE``."""

    value: float
    low: float
    high: float
    n: int

    @classmethod
    def of_logs(cls, mean: float, half_width: float, n: int) -> Change:
        """Convert the mean logarithm of the ratio B/A, and half the width of its interval."""
        value, low, high = (
            math.expm1(max(-700.0, min(700.0, x))) for x in (mean, mean - half_width, mean + half_width)
        )
        return cls(value, low, high, n)

    @property
    def significant(self) -> bool:
        """Whether the interval excludes no change."""
        return self.low > 0 or self.high < 0


@dataclass
class SideRecord(Record):
    """One of the two programs, over all of its processes. Times are medians."""

    label: str
    command: list[str]
    revision: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"
    unit: str = "step"
    processes: int = 0
    steps: int = 0
    step_ms: float | None = None
    samples_per_s: float | None = None
    start_s: float | None = None  # from the start of the process until its steps are steady
    peak_memory_bytes: int | None = None
    phases: dict[str, PhaseTime] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)  # by seed, of the steps that both sides ran


@dataclass
class LossVerdict(Record):
    """``verdict``: ``same bits``, ``within the spread``, ``different`` or ``not compared``."""

    verdict: str = "not compared"
    why: str = ""
    first_difference: int | None = None


@dataclass
class TrainingVerdict(Record):
    """``verdict``: ``same``, ``equivalent``, ``different`` or ``cannot tell``.

    ``first_step`` and ``first_tensor``: where the weights first differ by more than rounding explains."""

    verdict: str
    why: str
    first_step: int | None = None
    first_tensor: str = ""


@dataclass
class BlameRow(Record):
    """Operators of A and B that belong together. ``ms`` a step is B - A, with its interval.

    ``share``: of the whole difference. ``before``: the names in A, where B has others."""

    name: str
    change: str
    ms: float
    low: float
    high: float
    share: float
    a_calls: float
    b_calls: float
    before: str = ""
    place: SourceLocation | None = None
    blamed: bool = False


@dataclass
class Blame(Record):
    """What accounts for the difference in step time: ``ms`` with its interval. ``settings``: those that differ."""

    verdict: str
    ms: float = 0.0
    low: float = 0.0
    high: float = 0.0
    n: int = 0
    rows: list[BlameRow] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)


@dataclass
class Gate(Record):
    """A limit that B must keep. ``verdict``: ``passed``, ``failed`` or ``cannot tell``."""

    name: str
    limit: str
    verdict: str
    why: str


@dataclass
class CompareRecord(ProgramRecord):
    """``phases_ms``: the difference B - A of each phase in milliseconds, as (mean, low, high).

    ``pairs``: the change of the step time in each pair of processes."""

    schema: int = SCHEMA
    a: SideRecord | None = None
    b: SideRecord | None = None
    baseline: str = ""  # its name, if A was measured earlier
    step_time: Change | None = None
    memory: Change | None = None
    start: Change | None = None
    phases_ms: dict[str, list[float]] = field(default_factory=dict)
    pairs: list[float] = field(default_factory=list)
    losses: LossVerdict = field(default_factory=LossVerdict)
    training: TrainingVerdict | None = None  # with `--same-training`
    blame: Blame | None = None  # with `--blame`
    gates: list[Gate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def gate_failed(self) -> bool:
        return any(gate.verdict == "failed" for gate in self.gates)
