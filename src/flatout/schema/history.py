"""The record of `flatout ui`: what flatout left in a folder, without the measurements themselves.

Paths are relative to the folder, so that a page in it can link to them.
"""

from dataclasses import dataclass, field

from flatout.schema.records import Ratio, Record

HISTORY_SCHEMA = 2


@dataclass
class RunEntry(Record):
    """One run, by the process with the most steps.

    ``result``: ``finished``, ``failed`` or ``interrupted``, the worst of its ``processes``. ``setup``: machine,
    device, ranks and torch. Only runs of one setup form a series. ``levers`` are those of its plan."""

    record: str
    created: str
    result: str
    exit_reason: str
    setup: str
    steps: int
    steps_per_s: float | None
    peak_memory_bytes: int
    limited_by: str
    levers: list[str] = field(default_factory=list)
    processes: int = 1


@dataclass
class JobEntry(Record):
    """One command with its runs, oldest first. ``verdict`` and ``speedup``: of the newest `flatout tune`.
    ``reports``: their names and files."""

    folder: str
    command: list[str]
    verdict: str = ""
    speedup: Ratio | None = None
    unfinished: bool = False  # a search was interrupted
    runs: list[RunEntry] = field(default_factory=list)
    reports: dict[str, str] = field(default_factory=dict)


@dataclass
class HistoryRecord(Record):
    """Output of `flatout ui --json`. The job with the newest run comes first."""

    folder: str
    created: str
    flatout: str
    jobs: list[JobEntry] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # records that could not be read, with the reason
    schema: int = HISTORY_SCHEMA
