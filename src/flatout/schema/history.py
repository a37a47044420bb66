"""The record of `flatout ui`: what flatout left in a folder, without the measurements themselves.

Paths are relative to the folder, so that a page in it can link to them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flatout.schema.compare import Change, Gate
from flatout.schema.records import Ratio, Record

HISTORY_SCHEMA = 1


@dataclass
class Origin(Record):
    """Where a record was made. Runs of different origins are no series. "" if it is not known."""

    machine: str = ""
    torch: str = ""
    device: str = ""
    world_size: int = 1


@dataclass
class RunSeen(Record):
    """One run, by the process with the most steps of its first rank.

    ``result``: ``finished``, ``failed`` or ``interrupted``, the worst of its ``processes``. ``low`` and ``high``
    hold the middle 90 % of the live figures of steps/s, if there are some. ``peak_memory_bytes`` is that of the
    largest process. ``levers`` are those of its plan.
    """

    record: str
    created: str
    result: str
    how: str
    origin: Origin
    steps: int = 0
    seconds: float = 0.0
    steps_per_s: float | None = None
    low: float | None = None
    high: float | None = None
    peak_memory_bytes: int | None = None
    limited_by: str = ""
    levers: list[str] = field(default_factory=list)
    processes: int = 1


@dataclass
class SessionSeen(Record):
    """The newest session of `flatout tune`. ``levers`` are those of its plan."""

    record: str
    created: str
    outcome: str
    message: str
    origin: Origin
    speedup: Ratio | None = None
    levers: list[str] = field(default_factory=list)


@dataclass
class ComparisonSeen(Record):
    """The newest comparison. ``a`` and ``b`` name its sides, ``against`` the baseline, if A was one."""

    record: str
    created: str
    status: str
    message: str
    origin: Origin
    a: str = ""
    b: str = ""
    against: str = ""
    unit: str = "step"
    step_time: Change | None = None
    losses: str = ""
    gates: list[Gate] = field(default_factory=list)


@dataclass
class ProfileSeen(Record):
    """The newest profile. ``findings`` are their sentences, most important first."""

    record: str
    created: str
    status: str
    message: str
    origin: Origin
    unit: str = "step"
    step_ms: float | None = None
    bound: str = ""
    bound_why: str = ""
    findings: list[str] = field(default_factory=list)


@dataclass
class BaselineSeen(Record):
    """A stored baseline. ``step_ms`` is the median over its blocks of steps."""

    record: str
    name: str
    command: list[str]
    created: str
    origin: Origin
    revision: str = ""
    processes: int = 0
    step_ms: float | None = None


@dataclass
class JobSeen(Record):
    """One command. ``unfinished``: a session was interrupted. ``reports``: their names and files."""

    folder: str
    command: list[str]
    session: SessionSeen | None = None
    unfinished: bool = False
    runs: list[RunSeen] = field(default_factory=list)  # in the order in which they started
    comparison: ComparisonSeen | None = None
    profile: ProfileSeen | None = None
    reports: dict[str, str] = field(default_factory=dict)

    @property
    def newest(self) -> str:
        """When the newest record was made."""
        seen = (self.session, self.comparison, self.profile, *self.runs)
        return max((each.created for each in seen if each is not None), default="")


@dataclass
class SkippedFile(Record):
    path: str
    why: str


@dataclass
class HistoryRecord(Record):
    """Output of `flatout ui --json`. ``here``: the machine and software that made it. The newest job comes first."""

    folder: str
    created: str
    flatout: str
    here: Origin
    jobs: list[JobSeen] = field(default_factory=list)
    baselines: list[BaselineSeen] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)  # records that could not be read
    schema: int = HISTORY_SCHEMA
