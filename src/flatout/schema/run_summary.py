"""The record that a run leaves at its end, and what `flatout run` asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.schema.records import ProgramRecord

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

    @property
    def limited_by(self) -> str:
        """What took most of the time, as far as counters can tell."""
        if self.data_wait >= DATA_BOUND_SHARE:
            return f"waiting for data, {self.data_wait:.0%} of the time"
        if self.gpu_busy is not None and self.gpu_busy < GPU_BUSY_SHARE:
            return f"the host: the GPU was busy {self.gpu_busy:.0%} of the time"
        if self.device == "cuda":
            return "computing on the GPU"
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
        return (
            "profile" if self.data_wait >= DATA_BOUND_SHARE or (self.gpu_busy or 1.0) < GPU_BUSY_SHARE else ""
        )
