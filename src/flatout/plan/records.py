"""Records passed between measuring and rendering. They are JSON, and the file on disk is the interface.

Times are milliseconds unless a name says otherwise. A *tick* is the unit of measurement: one optimizer cycle,
or one backward pass if a cycle has many (LBFGS) and lasts seconds.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cache
from types import UnionType
from typing import Any, Self, get_args, get_origin, get_type_hints

SESSION_SCHEMA = 1
CONFIDENCE = 0.95  # of every interval
QUANTILE = 1.96  # of the normal law, at that level
NOT_SLOWER = 0.98  # a plan with a median gain is kept if the low end of its interval is at least this
PHASES = (
    "data",
    "copy",
    "forward",
    "backward",
    "exchange",
    "optimizer",
    "other",
)  # exchange: exposed exchange of gradients with other ranks


class Record:
    """Base class of records, with conversion to and from JSON.

    Annotations of fields name nested records. Unknown keys are ignored, so that an older flatout can show a
    newer record.
    """

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read a record. Raises TypeError or AttributeError for JSON of another shape."""
        kinds = _kinds(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{key: _revived(kinds[key], value, key) for key, value in data.items() if key in kinds})


@dataclass
class ProgramRecord(Record):
    """Command, versions and outcome of a flatout command on a program.

    A subclass sets its own ``schema`` number.
    """

    command: list[str]
    cwd: str
    schema: int = 0
    flatout: str = ""
    created: str = ""
    status: str = "running"  # running | done | failed
    message: str = ""
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)


@cache
def _kinds(record: type[Record]) -> dict[str, Any]:
    return get_type_hints(record)


def _revived(kind: Any, value: Any, key: str) -> Any:
    """Convert ``value`` to the annotated type ``kind``.

    Tables become records, also in lists and in tables of them.
    """
    if get_origin(kind) is UnionType:
        kind = next((one for one in get_args(kind) if _holds_records(one)), None)
    if value is None or isinstance(value, Record) or not _holds_records(kind):
        return value
    container = get_origin(kind) or dict
    if not isinstance(value, container):
        raise TypeError(
            f"{key} must be a {'list' if container is list else 'table'}, not {type(value).__name__}"
        )
    if container is list:
        return [_revived(get_args(kind)[0], each, key) for each in value]
    if get_origin(kind) is dict:
        return {name: _revived(get_args(kind)[1], each, key) for name, each in value.items()}
    return kind.from_json(value)


def _holds_records(kind: Any) -> bool:
    if get_origin(kind) in (list, dict):
        return _holds_records(get_args(kind)[-1])
    return isinstance(kind, type) and issubclass(kind, Record)


@dataclass
class Ratio(Record):
    """How many times as fast B is as A, with an interval of the level ``CONFIDENCE``.

    ``n`` is the number of pairs or blocks.
    """

    median: float
    low: float
    high: float
    n: int

    def against(self, factor: float) -> Ratio:
        """Return the ratio of the same B to a baseline that is ``factor`` times as fast as A."""
        return Ratio(self.median / factor, self.low / factor, self.high / factor, self.n)

    @property
    def certain(self) -> bool:
        """Return whether the whole interval is a gain."""
        return self.low > 1.0

    @property
    def chance(self) -> float:
        """Return the approximate probability that B is faster at all.

        The lower half of the interval is taken as a normal distribution of the logarithm.
        """
        if not 0 < self.low < self.median:
            return float(self.median > 1.0)
        return 0.5 * math.erfc(
            -QUANTILE * math.log(self.median) / math.log(self.median / self.low) / math.sqrt(2)
        )

    def sentence(self) -> str:
        return f"{self.median:.2f}x ({self.low:.2f}-{self.high:.2f}, n={self.n})"


@dataclass
class PhaseTime(Record):
    """One phase of a step: median and quartiles over the measured steps, and its share of the mean step."""

    median_ms: float
    low_ms: float
    high_ms: float
    share: float


@dataclass
class TrialRecord(Record):
    """Result of one trial: its ``result.json``.

    ``status`` is one of:

    * ``finished``: stopped by flatout
    * ``ended``: the program ended by itself
    * ``failed``: it raised, or exited with an error code
    * ``broken``: an internal error of flatout
    * ``hung``
    * ``unattached``

    ``losses`` are hexadecimal floats, one per backward pass since the start, including the warm-up.
    ``loss_steps`` is the step of each.
    """

    status: str
    reason: str = ""
    exit_code: int | None = None
    steps: int = 0
    warmup_steps: int = 0
    warmup_ms: float = 0.0
    unit: str = "step"
    step_ms: float | None = None
    step_ms_list: list[float] = field(default_factory=list)
    samples_per_step: float | None = None
    samples_per_s: float | None = None
    phases: dict[str, Any] = field(default_factory=dict)
    losses: list[str] = field(default_factory=list)
    loss_steps: list[int] = field(default_factory=list)
    batch_hashes: list[str] = field(default_factory=list)
    batch_statistics: list[list[float]] = field(default_factory=list)
    draws: list[list[list[float]]] = field(
        default_factory=list
    )  # a few samples fetched repeatedly: by round, by sample
    weights_digests: dict[str, str] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    device: str = "cpu"
    seed: int | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    applied: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    context: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    log_tail: str = ""

    @property
    def last_line(self) -> str:
        """Return the last line of the reason or of the output, without a full stop."""
        lines = (self.reason or self.log_tail).strip().splitlines()
        return lines[-1].strip().rstrip(".")[:300] if lines else self.status


@dataclass
class LeverRecord(Record):
    """Outcome of one lever in a session.

    ``ratio`` is against the plain program, or None if nothing was measured.
    """

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
    """One check of the guard: what was compared, the value, and the limit that it must stay below."""

    name: str
    passed: bool
    why: str
    value: float | None = None
    limit: float | None = None


@dataclass
class GuardRecord(Record):
    """Verdict of the guard, with its reason.

    ``verdict`` is ``same`` (bitwise), ``equivalent``, ``failed`` or ``not checked``; ``why`` explains it.
    ``plain_losses`` and ``tuned_losses`` hold one curve per seed, aligned by position. ``seeds`` names them.
    """

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
    ``peak_bytes`` is the peak of all tensors in a steady step. ``chosen`` marks the chosen plan.
    """

    plan: str
    peak_bytes: int | None = None
    ratio: Ratio | None = None
    fits: bool = False
    chosen: bool = False
    note: str = ""


@dataclass
class Prediction(Record):
    """Prediction of a profile's finding, and the measured ratio of its fastest lever.

    ``measured`` is None if none was measured.
    """

    rule: str
    name: str
    predicted: Ratio
    how: str = ""
    lever: str = ""
    measured: Ratio | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Prediction:
        record = super().from_json(data)
        record.predicted = (
            record.predicted if isinstance(record.predicted, Ratio) else Ratio.from_json(record.predicted)
        )
        record.measured = (
            Ratio.from_json(record.measured) if isinstance(record.measured, dict) else record.measured
        )
        return record


@dataclass
class RankPace(Record):
    """Step of one rank.

    Times are medians of the whole step, of the waits for data, of its own work, and of the exchange that was
    not hidden. ``samples`` and ``elements`` are means: its samples, and the elements that it passes to the
    model.
    """

    rank: int
    host: str
    step_ms: float
    data_ms: float
    compute_ms: float
    exchange_ms: float
    samples: float
    elements: float


@dataclass
class RanksRecord(Record):
    """Comparison of a program as ``procs`` ranks with the same program as one process.

    ``ratio`` is how many times as fast the ranks are. ``sent_bytes`` is what a rank contributes to the
    exchange per step. ``lost_ms`` of a step are spent waiting for the slowest rank. ``imbalance`` names that
    rank and the cause, if relevant.
    """

    procs: int
    division: dict[str, Any] = field(default_factory=dict)
    gpus: bool = False
    shards: bool = False  # each rank keeps a part of the weights
    one_process_ms: float | None = None
    ratio: Ratio | None = None
    sent_bytes: float = 0.0
    lost_ms: float = 0.0
    imbalance: str = ""
    paces: list[RankPace] = field(default_factory=list)
    why_not: str = ""  # reason for a missing comparison or recording


@dataclass
class NamedRecord(Record):
    """A lever that changes what is learned, tried because the user named it.

    ``ratio`` is against the plain program. The losses of both start from the same seed.
    """

    plan: str
    ratio: Ratio | None = None
    plain_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    why_not: str = ""


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
    effects: list[str] = field(default_factory=list)
    baseline: ProgramFigures = field(default_factory=ProgramFigures)
    best: ProgramFigures = field(default_factory=ProgramFigures)
    speedup: Ratio | None = None
    noise_floor: Ratio | None = None
    disturbance: str = ""  # load by other programs meanwhile, if relevant
    undecided: bool = (
        False  # the plain program stays for lack of time or of an idle machine, not because nothing is faster
    )
    obstacle: str = ""  # what prevents a larger speed-up, with the command that helps
    guard: GuardRecord = field(default_factory=lambda: GuardRecord("not checked", "nothing was chosen yet"))
    levers: list[LeverRecord] = field(default_factory=list)
    comparisons: list[ComparisonRecord] = field(default_factory=list)
    blocks: list[dict[str, Any]] = field(
        default_factory=list
    )  # measured blocks: process, levers on, at_s, window of ticks, ms, host
    payback_steps: int | None = None
    memory_limit_bytes: int | None = None  # as requested
    frontier: list[TimeMemoryPoint] = field(
        default_factory=list
    )  # time against memory, in measured order; the first is the reference
    ranks: RanksRecord | None = None  # if the program was tuned as several ranks
    named: list[NamedRecord] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)  # of the profile that the search started from
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    context: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SessionRecord:
        """Read a record. Raises TypeError or AttributeError for JSON of another shape."""
        record = super().from_json(data)
        if not isinstance(record.command, list) or not isinstance(record.key, dict):
            raise TypeError("command must be a list and key a table")
        return record
