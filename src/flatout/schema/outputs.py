"""Records that commands print with --json and keep in no file."""

from dataclasses import dataclass, field
from typing import Any

from flatout.schema.findings import Finding
from flatout.schema.machine_snapshot import CeilingsRecord, CheckResult, MachineSnapshot
from flatout.schema.records import Record

OUTPUT_SCHEMA = 1


@dataclass
class FindingsRecord(Record):
    """Output of `flatout check --json`. ``unread`` are files that could not be read, with the reason.

    ``steps`` and ``epochs`` were observed; ``notes`` say what was not."""

    files: list[str]
    unread: list[str]
    findings: list[Finding]
    steps: int = 0
    epochs: int = 0
    notes: list[str] = field(default_factory=list)
    schema: int = OUTPUT_SCHEMA


@dataclass
class Explanation(Finding):
    """A failure that `flatout explain` knows. ``ranks`` are the ranks that report it."""

    ranks: list[int] = field(default_factory=list)


@dataclass
class ExplanationsRecord(Record):
    """Output of `flatout explain --json`. Without a known failure, ``explanations`` is empty."""

    explanations: list[Explanation]
    schema: int = OUTPUT_SCHEMA


@dataclass
class Page(Record):
    """The page of a rule or of a kind of failure."""

    code: str
    name: str
    page: str


@dataclass
class PagesRecord(Record):
    """Output of `flatout check --explain CODE --json`, and of `flatout explain --list --json`."""

    pages: list[Page]
    schema: int = OUTPUT_SCHEMA


@dataclass
class DoctorRecord(Record):
    """Output of `flatout doctor --json`. ``ceilings`` is there with --bench."""

    snapshot: MachineSnapshot
    checks: list[CheckResult]
    ceilings: CeilingsRecord | None = None
    schema: int = OUTPUT_SCHEMA


@dataclass
class PlanChoice(Record):
    """One lever of a plan.

    ``code`` is the equivalent code. ``reason`` is why the newest session did not apply the lever."""

    name: str
    value: Any
    origin: str
    evidence: str = ""
    code: str = ""
    reason: str = ""


@dataclass
class PlanRecord(Record):
    """Output of `flatout plan --json`. ``path`` is empty for --template."""

    path: str
    choices: list[PlanChoice]
    made_for: dict[str, Any] = field(default_factory=dict)
    schema: int = OUTPUT_SCHEMA


@dataclass
class LeverPage(Record):
    """One lever. ``live`` is whether it can be switched between steps; ``moment`` is when it acts."""

    name: str
    effect: str
    moment: str
    live: bool
    page: str


@dataclass
class LeversRecord(Record):
    """Output of `flatout levers --json`: all levers in the order in which they are applied, or one."""

    levers: list[LeverPage]
    schema: int = OUTPUT_SCHEMA


@dataclass
class CheckpointEntry(Record):
    """One checkpoint. ``why_not`` is why it is not valid; then the fields below it are empty."""

    path: str
    step: int
    valid: bool
    why_not: str = ""
    mid_step: bool = False  # written during a step
    updated: bool = False  # some weights were already those of the next step
    process_age_s: float | None = None
    created: str = ""
    trigger: str = ""  # interval, a signal, ...
    total_bytes: int = 0
    contents: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


@dataclass
class CheckpointsRecord(Record):
    """Output of `flatout rescue --json`: the checkpoints of the newest run, then those of earlier runs."""

    checkpoints: list[CheckpointEntry]
    schema: int = OUTPUT_SCHEMA


@dataclass
class ExportRecord(Record):
    """Output of `flatout rescue --to DIR --json`. ``lines`` of Python load the files."""

    checkpoint: str
    step: int
    folder: str
    files: list[str]
    lines: list[str]
    schema: int = OUTPUT_SCHEMA


@dataclass
class KernelCheck(Record):
    """One check of a kernel. ``status`` is ``ok``, ``failed`` or ``not run``."""

    kernel: str
    name: str
    status: str
    why: str = ""


@dataclass
class KernelChecksRecord(Record):
    """Output of `flatout kernel check --json`."""

    checks: list[KernelCheck]
    schema: int = OUTPUT_SCHEMA
