"""The record of a search: every measurement of one session."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.schema.enums import StrEnum
from flatout.schema.records import MIN_RATIO_LOW, Ratio, Record

SESSION_SCHEMA = 1
FASTER_BESIDE = "faster beside other programs, cannot tell how much"


@dataclass
class LeverRecord(Record):
    """Outcome of one lever in a session.

    ``ratio`` is against the plain program, or None if nothing was measured."""

    name: str
    value: Any
    status: str
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    n: int = 0
    reason: str = ""
    effect: str = ""
    how: str = ""  # "live" (switched inside one process) or "processes" (fresh processes, interleaved)


@dataclass
class GuardCheck(Record):
    """One check of the guard: what was compared, the value, and the limit that it must stay below.

    ``passed`` is None if the check could not be made; ``why`` is then the reason."""

    name: str
    passed: bool | None
    why: str
    value: float | None = None
    limit: float | None = None


@dataclass
class GuardRecord(Record):
    """Verdict of the guard, with its reason.

    ``verdict`` is ``same`` (bitwise), ``equivalent``, ``failed`` or ``not checked``; ``why`` explains it.
    ``plain_losses`` and ``tuned_losses`` hold one curve per seed, aligned by position. ``seeds`` names them."""

    verdict: str
    why: str
    checks: list[GuardCheck] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    plain_losses: list[list[float]] = field(default_factory=list)
    tuned_losses: list[list[float]] = field(default_factory=list)


@dataclass
class ProgramFigures(Record):
    """Figures of the plain program, or of the program under the best Plan."""

    plan: dict[str, Any] = field(default_factory=dict)
    step_ms: float | None = None
    samples_per_s: float | None = None
    unit: str = "step"
    phases: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    warmup_ms: float = 0.0
    steps: int = 0


@dataclass
class ComparisonRecord(Record):
    """One comparison: a Plan against the plain program or another Plan."""

    plan: str
    against: str
    how: str
    ratio: float | None
    low: float | None
    high: float | None
    n: int
    note: str = ""
    seconds: float = 0.0
    host: str = ""  # remote machines that measured it


@dataclass
class TimeMemoryPoint(Record):
    """One point of the frontier of time and memory.

    ``ratio`` is against the first point. It is None for that point, and if nothing could be measured.
    ``peak_bytes`` is the peak of all tensors in a steady step. ``chosen`` marks the chosen plan."""

    plan: str
    peak_bytes: int | None = None
    ratio: Ratio | None = None
    fits: bool = False
    chosen: bool = False
    note: str = ""


@dataclass
class RanksRecord(Record):
    """Comparison of a program as ``procs`` ranks with the same program as one process.

    ``ratio`` is how many times as fast the ranks are."""

    procs: int
    division: dict[str, Any] = field(default_factory=dict)
    gpus: bool = False
    shards: bool = False  # each rank keeps a part of the weights
    ratio: Ratio | None = None
    why_not: str = ""  # reason for a missing comparison


@dataclass
class NamedLeverRecord(Record):
    """A lever that changes what is learned, tried only because the user named it.

    ``ratio`` is against the plain program. The losses of both start from the same seed."""

    plan: str
    ratio: Ratio | None = None
    plain_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    why_not: str = ""


class SessionOutcome(StrEnum):
    RUNNING = "running"
    FAILED = "failed"
    FASTER = "faster"  # the plan is faster, and the guard accepts its results
    CHANGED = "changed"  # faster, but the guard rejected the results
    FITS = "fits"  # the plan fits into the memory limit, the plain program does not
    UNDECIDED = "undecided"  # the plain program stays: no time, or no idle machine, for a verdict
    UNCHANGED = "unchanged"  # the plain program stays: nothing is faster beyond the noise


@dataclass
class SessionRecord(Record):
    """Everything that one `flatout tune` learned. Saved after every comparison as ``session.json``."""

    command: list[str]
    cwd: str
    key: dict[str, Any]
    schema: int = SESSION_SCHEMA
    flatout: str = ""
    created: str = ""  # ISO 8601, UTC
    status: str = "running"  # running | done | failed
    message: str = ""  # the verdict in one sentence
    budget_s: float = 0.0
    spent_s: float = 0.0
    overrun: str = ""  # why it took over 10 % longer than the budget
    effects: list[str] = field(default_factory=list)
    baseline: ProgramFigures = field(default_factory=ProgramFigures)
    best: ProgramFigures = field(default_factory=ProgramFigures)
    speedup: Ratio | None = None  # None beside other programs
    noise_floor: Ratio | None = None
    disturbance: str = ""  # load by other programs meanwhile, if relevant
    undecided: bool = False  # the plain program stays for lack of time or of an idle machine
    memory_reason: str = ""  # levers of the plan that take more memory, and for what
    obstacle: str = ""  # what prevents a larger speed-up, with the command that helps
    guard: GuardRecord = field(default_factory=lambda: GuardRecord("not checked", "nothing was chosen yet"))
    nan_loss: str = ""  # a sentence, if the plain program's loss is NaN
    levers: list[LeverRecord] = field(default_factory=list)
    comparisons: list[ComparisonRecord] = field(default_factory=list)
    # Measured: process, levers on, at_s, window of ticks, ms, host
    blocks: list[dict[str, Any]] = field(default_factory=list)
    payback_steps: int | None = None
    memory_limit_bytes: int | None = None  # as requested
    # In measured order; the first is the reference
    frontier: list[TimeMemoryPoint] = field(default_factory=list)
    certificate: CertificateRecord | None = None  # of the confirmed plan; a file beside the plan has it too
    plan_path: str = ""  # to be named with --plan, where `flatout run` would not find the plan
    ranks: RanksRecord | None = None  # if the program was tuned as several ranks
    named_levers: list[NamedLeverRecord] = field(default_factory=list)
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    untested: str = ""  # as in ProgramRecord
    context: dict[str, Any] = field(default_factory=dict)

    @property
    def too_large(self) -> bool:
        """Whether the plain program exceeds the memory limit."""
        first = self.frontier[0] if self.frontier else None
        return bool(self.memory_limit_bytes and first is not None and first.peak_bytes and not first.fits)

    @property
    def kept(self) -> bool:
        """Whether a plan was kept; beside other programs it has no ``speedup``."""
        beside = self.disturbance and not self.undecided
        return self.speedup is not None or bool(beside and self.best.plan.get("choices"))

    @property
    def gain(self) -> float | None:
        """The median speed-up if it exceeds 1 and its interval excludes a relevant slowdown."""
        if self.speedup is None or not self.speedup.usable:
            return None
        return self.speedup.median if self.speedup.median > 1 and self.speedup.low >= MIN_RATIO_LOW else None

    @property
    def outcome(self) -> SessionOutcome:
        if self.status in ("failed", "running"):
            return SessionOutcome(self.status)
        if self.kept and self.too_large:
            return SessionOutcome.FITS
        if self.gain is None and (self.speedup is not None or not self.kept):
            return SessionOutcome.UNDECIDED if self.undecided else SessionOutcome.UNCHANGED
        return SessionOutcome.CHANGED if self.guard.verdict == "failed" else SessionOutcome.FASTER

    def to_json(self) -> dict[str, Any]:
        """The fields, and the ``outcome``, for readers of the file."""
        return {**super().to_json(), "outcome": self.outcome}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SessionRecord:
        record = super().from_json(data)
        if not isinstance(record.command, list) or not isinstance(record.key, dict):
            raise TypeError("command must be a list and key a table")
        return record


# The certificate of a confirmed plan: what its verdict was made from.

CERTIFICATE_SCHEMA = 1


@dataclass
class CertifiedRun(Record):
    """Fields of a TrialRecord, which the guard compared."""

    seed: int
    warmup_steps: int
    steps: int
    losses: list[str]
    loss_steps: list[int]
    weights_digests: dict[str, str]
    batch_hashes: list[str]


@dataclass
class CertificateRecord(Record):
    """What the verdict on a plan was made from. It names no absolute path.

    ``plain[i]`` and ``tuned[i]`` had the same seed. ``key`` has the digests of your files, the versions and the
    machine. ``repeatable``: a plain run repeats its own losses."""

    command: list[str]
    key: dict[str, str]
    plan: dict[str, Any]
    verdict: str  # of the guard: same or equivalent
    why: str
    repeatable: bool
    speedup: Ratio | None  # None beside other programs
    plain: list[CertifiedRun]
    tuned: list[CertifiedRun]
    schema: int = CERTIFICATE_SCHEMA


@dataclass
class VerifiedLine(Record):
    """A claim of a certificate. ``status``: holds, FAILED, not checked, differs or not claimed."""

    name: str
    status: str
    why: str


@dataclass
class VerificationRecord(Record):
    """Output of `flatout verify --json`."""

    holds: bool
    lines: list[VerifiedLine]
    schema: int = CERTIFICATE_SCHEMA
