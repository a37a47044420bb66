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
    checkpoints even if the program cannot be resumed from them. ``shows``: show the output of the replay.
    """

    from_scratch: bool = False
    shows: bool = False
    rescue: bool = False
    required: bool = True


@dataclass(frozen=True)
class RunRequest:
    """``entry``: function that the program calls after ``import torch``, as ``module:function``.

    ``pid``: process ID of the program's first process. ``started``: outcomes of the PROCESS levers, which
    acted before the program started. ``seed``: the random seed of several ranks; None leaves randomness to the script. ``watch``:
    figures for the live line; None for no live line. ``rescue``: folder for checkpoints; None keeps none.
    ``summary``: the record at the end; None for none.
    """

    entry: str
    plan: Plan
    facts: Facts
    pid: int
    started: tuple[Mapping[str, Any], ...] = ()
    seed: int | None = None
    watch: Mapping[str, float] | None = None
    rescue: str | None = None
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
            started=tuple(data["started"]),
            seed=data["seed"],
            watch=data["watch"],
            rescue=data["rescue"],
            resume=ResumeOptions(**data["resume"]) if data["resume"] is not None else None,
            summary=SummaryRequest.from_json(data["summary"]) if data["summary"] is not None else None,
        )
