"""The plain records between measuring and showing. Everything here is JSON, and the file on disk is the interface.

Times are milliseconds unless a name says otherwise. A *tick* is the unit of measuring: one optimizer cycle, or one
backward pass where a cycle holds many (LBFGS) and lasts seconds.
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
NOT_SLOWER = 0.98  # a plan whose median is a gain is kept where the low end of its interval is at least this
PHASES = ("data", "copy", "forward", "backward", "exchange", "optimizer", "other")  # exchange: of gradients with other ranks, as far as it was waited for


class Record:
    """JSON both ways; a field's annotation says which records lie inside. Unknown keys are ignored, so that an older flatout can show a newer record."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Raises TypeError or AttributeError for what is JSON, and no such record."""
        kinds = _kinds(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{key: _revived(kinds[key], value, key) for key, value in data.items() if key in kinds})


@dataclass
class ProgramRecord(Record):
    """What a command asked of a program, with which versions, and how that ended. A subclass gives ``schema`` its own number."""

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
    """``value`` as ``kind`` says: tables become records, in lists and in tables of them too."""
    if get_origin(kind) is UnionType:
        kind = next((one for one in get_args(kind) if _holds_records(one)), None)
    if value is None or isinstance(value, Record) or not _holds_records(kind):
        return value
    container = get_origin(kind) or dict
    if not isinstance(value, container):
        raise TypeError(f"{key} is a {'list' if container is list else 'table'}, not {type(value).__name__}")
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
    """How many times faster B is than A, with an interval of the level ``CONFIDENCE``. ``n`` counts the pairs or blocks behind it."""

    median: float
    low: float
    high: float
    n: int

    def against(self, factor: float) -> Ratio:
        """The same B against something ``factor`` times faster than A."""
        return Ratio(self.median / factor, self.low / factor, self.high / factor, self.n)

    @property
    def certain(self) -> bool:
        """Whether the whole interval is a gain."""
        return self.low > 1.0

    @property
    def chance(self) -> float:
        """Roughly how probable it is that B is faster at all: the lower half of the interval as a normal law of the logarithm."""
        if not 0 < self.low < self.median:
            return float(self.median > 1.0)
        return 0.5 * math.erfc(-QUANTILE * math.log(self.median) / math.log(self.median / self.low) / math.sqrt(2))

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
    """What one trial left behind: its ``result.json``.

    ``status`` is ``finished`` (stopped by us), ``ended`` (the program came to its own end), ``failed`` (it raised,
    or left with an exit code), ``broken`` (flatout itself made a mistake), ``hung`` or ``unattached``. ``losses`` are
    hexadecimal floats, one for each backward pass since the start, warm-up included; ``loss_steps`` is the step each
    belongs to.
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
    draws: list[list[list[float]]] = field(default_factory=list)  # a few samples fetched again and again: by round, by sample
    weights_digests: dict[str, str] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    device: str = "cpu"
    seed: int | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    applied: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    scene: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    log_tail: str = ""

    @property
    def last_line(self) -> str:
        """Of why it ended, or of what it said last; without its stop."""
        lines = (self.reason or self.log_tail).strip().splitlines()
        return lines[-1].strip().rstrip(".")[:300] if lines else self.status


@dataclass
class LeverRecord(Record):
    """How one lever ended in a session. ``ratio`` is against the plain program, None where nothing was measured."""

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
    """One comparison of the guard: what was compared, the value seen, the limit it must stay below."""

    name: str
    passed: bool
    why: str
    value: float | None = None
    limit: float | None = None


@dataclass
class GuardRecord(Record):
    """``verdict`` is ``same`` (bitwise), ``equivalent``, ``failed`` or ``not checked``; ``why`` says it in words.

    ``plain_losses`` and ``tuned_losses`` hold one curve a seed, aligned by position; ``seeds`` names them.
    """

    verdict: str
    why: str
    checks: list[GuardCheck] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    plain_losses: list[list[float]] = field(default_factory=list)
    tuned_losses: list[list[float]] = field(default_factory=list)


@dataclass
class Side(Record):
    """One side of the before-and-after: the plain program, or the program under the best Plan."""

    plan: dict[str, Any] = field(default_factory=dict)
    step_ms: float | None = None
    samples_per_s: float | None = None
    unit: str = "step"
    phases: dict[str, Any] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    warmup_ms: float = 0.0
    steps: int = 0


@dataclass
class Contest(Record):
    """One comparison that was tried: a Plan against the plain program (or against another Plan)."""

    plan: str
    against: str
    how: str
    ratio: float | None
    low: float | None
    high: float | None
    n: int
    note: str = ""
    seconds: float = 0.0
    host: str = ""  # of other machines, those that measured it


@dataclass
class Point(Record):
    """One place on the frontier of time and memory. ``ratio`` is against the first point, None for that one or where nothing could be measured;
    ``peak_bytes`` is the most that tensors took within a steady step. ``chosen`` marks the plan that was taken."""

    plan: str
    peak_bytes: int | None = None
    ratio: Ratio | None = None
    fits: bool = False
    chosen: bool = False
    note: str = ""


@dataclass
class Prediction(Record):
    """What a profile's finding promised, and what the lever that came nearest to it brought. ``measured`` is None where none was measured."""

    rule: str
    name: str
    predicted: Ratio
    how: str = ""
    lever: str = ""
    measured: Ratio | None = None

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Prediction:
        record = super().from_json(data)
        record.predicted = record.predicted if isinstance(record.predicted, Ratio) else Ratio.from_json(record.predicted)
        record.measured = Ratio.from_json(record.measured) if isinstance(record.measured, dict) else record.measured
        return record


@dataclass
class RankPace(Record):
    """What a step is for one rank: medians of the whole, of the waits for data, of its own work, of the exchange that was not hidden; means of the number
    of its samples and of the elements that it hands to the model."""

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
    """A program as ``procs`` ranks beside the same as one process. ``ratio`` says how many times as fast; ``sent_bytes`` are what a rank hands over in a step.

    ``lost_ms`` of a step go into waiting for the slowest rank; ``imbalance`` says which that is and why, where it is worth saying.
    """

    procs: int
    division: dict[str, Any] = field(default_factory=dict)
    gpus: bool = False
    shards: bool = False  # each keeps a part of the weights
    one_process_ms: float | None = None
    ratio: Ratio | None = None
    sent_bytes: float = 0.0
    lost_ms: float = 0.0
    imbalance: str = ""
    paces: list[RankPace] = field(default_factory=list)
    why_not: str = ""  # nothing could be compared or heard


@dataclass
class NamedRecord(Record):
    """A lever that changes what is learned, tried because a person has named it: ``ratio`` against the plain program, and the losses of both from one seed."""

    plan: str
    ratio: Ratio | None = None
    plain_losses: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    why_not: str = ""


@dataclass
class SessionRecord(Record):
    """Everything one `flatout tune` learned. Saved after every contest as ``session.json``."""

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
    baseline: Side = field(default_factory=Side)
    best: Side = field(default_factory=Side)
    speedup: Ratio | None = None
    noise_floor: Ratio | None = None
    disturbance: str = ""  # what other programs did to the machine meanwhile, where it is worth saying
    undecided: bool = False  # the plain program stays because time or a quiet machine was missing, not because nothing is faster
    obstacle: str = ""  # what stands in the way of more, with the command that would help
    guard: GuardRecord = field(default_factory=lambda: GuardRecord("not checked", "nothing was chosen yet"))
    levers: list[LeverRecord] = field(default_factory=list)
    contests: list[Contest] = field(default_factory=list)
    blocks: list[dict[str, Any]] = field(default_factory=list)  # every measured block: process, what was on, at_s, window of ticks, ms, host
    payback_steps: int | None = None
    memory_limit_bytes: int | None = None  # what was asked for
    frontier: list[Point] = field(default_factory=list)  # time against memory, in the order of measuring; the first is the point of comparison
    ranks: RanksRecord | None = None  # where the program was tuned as several
    named: list[NamedRecord] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)  # of the profile that told the search where to begin
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    scene: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> SessionRecord:
        """Raises TypeError or AttributeError for what is JSON, and no session."""
        record = super().from_json(data)
        if not isinstance(record.command, list) or not isinstance(record.key, dict):
            raise TypeError("command is a list and key a table")
        return record
