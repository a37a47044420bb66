"""What `flatout run` asks of the program that it starts. The program reads it from the file FLATOUT_JOB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.schema.facts import Facts
from flatout.schema.findings import Finding, SourceLocation
from flatout.schema.plan import Plan
from flatout.schema.records import ProgramRecord, Ratio, Record


@dataclass(frozen=True)
class ResumeOptions:
    """How a run resumes exactly.

    ``required``: exit, instead of starting from scratch, if an exact resume is impossible. ``rescue``: keep
    checkpoints even if the program cannot be resumed from them. ``show_output``: show the output of the replay."""

    from_scratch: bool = False
    show_output: bool = False
    rescue: bool = False
    required: bool = True


@dataclass(frozen=True)
class RunRequest:
    """``entry``: function that the program calls after ``import torch``, as ``module:function``.

    ``pid``: process ID of the program's first process. ``process_outcomes``: outcomes of the PROCESS levers, which
    acted before the program started. ``seed``: the random seed of several ranks; None leaves randomness to the script. ``live_line``:
    the ``ideal_ms`` of a step, if known; None for no live line. ``checkpoint_folder``: None keeps no checkpoints.
    ``summary``: the record at the end; None for none. ``checks``: further functions like ``entry``; they say what will
    ruin the run, except the rules in ``silenced``."""

    entry: str
    plan: Plan
    facts: Facts
    pid: int
    process_outcomes: tuple[Mapping[str, Any], ...] = ()
    seed: int | None = None
    live_line: Mapping[str, float] | None = None
    checkpoint_folder: str | None = None
    resume: ResumeOptions | None = None
    summary: SummaryRequest | None = None
    checks: tuple[str, ...] = ()
    silenced: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "plan": self.plan.to_json(),
            "facts": self.facts.to_json(),
            "resume": vars(self.resume) if self.resume is not None else None,
            "summary": vars(self.summary) if self.summary is not None else None,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> RunRequest:
        return cls(
            entry=data["entry"],
            plan=Plan.from_json(data["plan"]),
            facts=Facts.from_json(data["facts"]),
            pid=data["pid"],
            process_outcomes=tuple(data["process_outcomes"]),
            seed=data["seed"],
            live_line=data["live_line"],
            checkpoint_folder=data["checkpoint_folder"],
            resume=ResumeOptions(**data["resume"]) if data["resume"] is not None else None,
            summary=SummaryRequest.from_json(data["summary"]) if data["summary"] is not None else None,
            checks=tuple(data["checks"]),
            silenced=tuple(data["silenced"]),
        )


# The record that a run leaves at its end, and what `flatout run` asks for it.

SCHEMA = 1
DATA_BOUND_SHARE = 0.15  # of the time: from here on, waiting for data limits a run
GPU_BUSY_SHARE = 0.7  # of the time: from here on, a GPU counts as busy

EXPORT_FAILED = "flatout: export: "  # prefix of the failures in a tracker's log

# Live figures of a moment, in the order in which trackers show them.
LIVE_FIGURES = ("steps_per_s", "samples_per_s", "data_wait", "cores_used", "memory_bytes", "gpu_busy")


@dataclass(frozen=True)
class SummaryRequest:
    """``folder`` and ``name`` of the record. ``print_summary``: print it. ``every_s``: seconds between live figures; 0 for none.

    ``machine``: its name (`Facts.machine`).
    ``piped``: the program came through a pipe, so that no other command can start it again."""

    folder: str
    name: str
    command: tuple[str, ...]
    created: str
    print_summary: bool = True
    every_s: float = 0.0
    machine: str = ""
    piped: bool = False

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> SummaryRequest:
        return cls(**{**data, "command": tuple(data["command"])})


@dataclass
class CompileRecord(Record):
    """What torch.compile did. ``reasons`` of breaks and recompilations end with their line."""

    graphs: int = 0
    recompiles: int = 0
    breaks: int = 0
    reasons: list[str] = field(default_factory=list)
    places: list[SourceLocation] = field(default_factory=list)
    ms: float = 0.0  # spent compiling, whole run
    saved_ms: float = 0.0  # that compiling took where the cached code was made
    cached: int = 0  # forward and backward passes whose code came from the cache
    uncached: int = 0


@dataclass
class RunSummary(ProgramRecord):
    """Figures from the first to the last optimizer step of one process.

    ``data_wait`` and ``gpu_busy`` are shares of that time, ``cores_used`` a mean, memory a peak in bytes.
    ``exit_reason``: ``ended``, or the exception that ended the program."""

    schema: int = SCHEMA
    machine: str = ""
    rank: int = 0
    world_size: int = 1
    plan: dict[str, Any] = field(default_factory=dict)
    exit_reason: str = "ended"
    steps: int = 0
    seconds: float = 0.0
    steps_per_s: float | None = None
    samples_per_s: float | None = None
    data_wait: float = 0.0
    cores_used: float = 0.0
    cores: int = 1
    peak_memory_bytes: int = 0
    gpu_busy: float | None = None
    piped: bool = False
    compiled: CompileRecord | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def limited_by(self) -> str:
        """What took most of the time, as far as counters can tell."""
        if self.data_wait >= DATA_BOUND_SHARE:
            return f"waiting for data, {self.data_wait:.0%} of the time"
        if self.gpu_busy is not None and self.gpu_busy < GPU_BUSY_SHARE and self.steps_per_s:
            step_ms = 1000 / self.steps_per_s
            idle_ms = (1 - self.gpu_busy) * step_ms
            return f"launches and Python: the device is idle {idle_ms:.1f} of {step_ms:.1f} ms a step"
        if self.device == "cuda":
            return (
                "unknown: no load of the GPU was reported"
                if self.gpu_busy is None
                else "computing on the GPU"
            )
        return f"computing, on {self.cores_used:.1f} of {self.cores} cores"

    @property
    def result(self) -> str:
        return {"ended": "finished", "KeyboardInterrupt": "interrupted"}.get(self.exit_reason, "failed")

    @property
    def has_levers(self) -> bool:
        return bool(self.plan.get("choices"))

    @property
    def next_command(self) -> str:
        """The flatout command that may help; "" if none can."""
        if self.piped:
            return ""
        if not self.has_levers:
            return "tune"
        return "" if self.limited_by.startswith("computing") else "profile"


# The record of `flatout ui`: what flatout left in a folder, without the measurements themselves.
#
# Paths are relative to the folder, so that a page in it can link to them.

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
