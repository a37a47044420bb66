"""Records passed between measuring and rendering. They are JSON, and the file on disk is the interface.

Times are milliseconds unless a name says otherwise. A *tick* is the unit of measurement: one optimizer cycle,
or one backward pass if a cycle has many (LBFGS) and lasts seconds.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from flatout.schema.errors import error_line

if TYPE_CHECKING:
    from typing_extensions import Self  # typing.Self of Python 3.11

CONFIDENCE = 0.95  # of every interval
QUANTILE = 1.96  # of the normal distribution, at that level
TRIAL_SCHEMA = 1
MIN_RATIO_LOW = 0.98  # a plan with a median gain is kept if the low end of its interval is at least this
# exchange: exposed exchange of gradients with other ranks
PHASES = ("data", "copy", "forward", "backward", "exchange", "optimizer", "other")


class Record:
    """Base class of records, with conversion to and from JSON.

    Annotations of fields name nested records. Unknown keys are ignored, so that an older flatout can show a
    newer record."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload,no-any-return]

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """Read a record. Raises TypeError or AttributeError for JSON of another shape."""
        kinds = _field_types(cls)  # type: ignore[arg-type]  # a class is hashable
        return cls(**{key: _restored(kinds[key], value, key) for key, value in data.items() if key in kinds})


@dataclass
class ProgramRecord(Record):
    """Command, versions and outcome of a flatout command on a program.

    A subclass sets its own ``schema`` number."""

    command: list[str]
    cwd: str
    schema: int = 0
    flatout: str = ""
    created: str = ""
    status: str = "running"  # running | done | failed
    message: str = ""
    device: str = "cpu"
    versions: dict[str, str] = field(default_factory=dict)
    untested: str = ""  # a torch newer than the tested ones, in one sentence
    disturbance: str = ""  # load by other programs meanwhile, if relevant


@cache
def _field_types(record: type[Record]) -> dict[str, Any]:
    return get_type_hints(record)


def _restored(kind: Any, value: Any, key: str) -> Any:
    """Convert ``value`` to the annotated type ``kind``.

    Tables become records, also in lists and in tables of them."""
    if get_origin(kind) is UnionType:
        kind = next((member for member in get_args(kind) if _contains_records(member)), None)
    if value is None or isinstance(value, Record) or not _contains_records(kind):
        return value
    container = get_origin(kind) or dict
    if not isinstance(value, container):
        raise TypeError(
            f"{key} must be a {'list' if container is list else 'table'}, not {type(value).__name__}"
        )
    if container is list:
        return [_restored(get_args(kind)[0], item, key) for item in value]
    if get_origin(kind) is dict:
        return {name: _restored(get_args(kind)[1], item, key) for name, item in value.items()}
    return kind.from_json(value)


def _contains_records(kind: object) -> bool:
    if get_origin(kind) in (list, dict):
        return _contains_records(get_args(kind)[-1])
    return isinstance(kind, type) and issubclass(kind, Record)


@dataclass
class Ratio(Record):
    """How many times as fast B is as A, with an interval of the level ``CONFIDENCE``.

    ``n`` is the number of pairs or blocks."""

    median: float
    low: float
    high: float
    n: int

    @property
    def usable(self) -> bool:
        """Whether all numbers are positive and of a size that a measurement can have; a file may hold anything."""
        numbers = (self.median, self.low, self.high)
        return all(type(number) in (int, float) and 0 <= number < 1e30 for number in numbers)

    def relative_to(self, factor: float) -> Ratio:
        """Return the ratio of the same B to a baseline that is ``factor`` times as fast as A."""
        return Ratio(self.median / factor, self.low / factor, self.high / factor, self.n)

    @property
    def significant(self) -> bool:
        """Return whether the whole interval is a gain."""
        return self.low > 1.0

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
    ``loss_steps`` is the step of each."""

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
    # A few samples fetched repeatedly: by round, by sample
    fetched_samples: list[list[list[float]]] = field(default_factory=list)
    weights_digests: dict[str, str] = field(default_factory=dict)
    # By step, by parameter or buffer
    weights_sketches: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    device: str = "cpu"
    seed: int | None = None
    plan: dict[str, Any] = field(default_factory=dict)
    applied: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    context: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    log_tail: str = ""
    schema: int = TRIAL_SCHEMA

    @property
    def error_line(self) -> str:
        """Return the line of the reason or of the output that says what failed, without a full stop."""
        text = (self.reason or self.log_tail).strip()
        return error_line(text).rstrip(".") if text else self.status
