"""What `flatout run` asks of the program that it starts. The program reads it from the file FLATOUT_JOB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.schema.run_summary import SummaryRequest


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
    ``summary``: the record at the end; None for none."""

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
        )
