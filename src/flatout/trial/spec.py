"""What a trial is asked to do: ``spec.json`` in its folder, read by every process of the program."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Lever
from flatout.plan.plan import Plan

ENTRY = "flatout.trial.worker:attach"
TABLE = "flatout.levers:TABLE"


@dataclass(frozen=True)
class TrialSpec:
    """``address`` is the socket on which the parent speaks; ``seed`` None leaves the program's randomness alone.

    ``shake`` rounds otherwise from the first step on, by this share (flatout.engine.perturb): how far does the program carry rounding?
    """

    folder: str
    address: str
    plan: Plan = field(default_factory=Plan)
    facts: Facts = field(default_factory=Facts)
    seed: int | None = 0
    reseed: bool = False  # add the seed to those that the program sets itself, so that another seed is another run
    entry: str = ENTRY
    shake: float = 0.0
    shelter: bool = True
    watch: bool = False  # loaders, garbage collection and habits are watched beside the steps, for a profile
    table: str = TABLE  # "module:NAME" of the levers that a Plan's names stand for
    wishes: dict[str, Any] = field(default_factory=dict)  # for an entry other than the ordinary one

    def to_json(self) -> dict[str, Any]:
        return {**{k: v for k, v in asdict(self).items() if k not in ("plan", "facts")},
                "plan": self.plan.to_json(), "facts": self.facts.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrialSpec:
        names = ("folder", "address", "seed", "reseed", "entry", "shake", "shelter", "watch", "table", "wishes")
        return cls(**{n: data[n] for n in names}, plan=Plan.from_json(data["plan"]), facts=Facts.from_json(data["facts"]))


def levers(table: str) -> tuple[Lever, ...]:
    """The lever table that ``module:NAME`` names."""
    module, name = table.split(":")
    found: tuple[Lever, ...] = getattr(import_module(module), name)
    return found
