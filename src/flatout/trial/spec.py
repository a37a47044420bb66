"""The specification of a trial: ``spec.json`` in its folder, read by every process of the program."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

from flatout.schema.facts import Facts
from flatout.schema.lever import Lever
from flatout.schema.plan import Plan

ENTRY = "flatout.trial.worker:attach"
TABLE = "flatout.levers:TABLE"


@dataclass(frozen=True)
class TrialSpec:
    """The options of a trial.

    ``address`` is the parent's socket; ``seed`` None leaves the program's randomness alone. ``perturbation``
    perturbs rounding from the first step on, by this share (flatout.guard.perturb), to see how far the
    program amplifies it.
    """

    folder: str
    address: str
    plan: Plan = field(default_factory=Plan)
    facts: Facts = field(default_factory=Facts)
    seed: int | None = 0
    reseed: bool = False  # add the seed to the program's own seeds, so that another seed gives another run
    entry: str = ENTRY
    perturbation: float = 0.0
    sandbox: bool = True
    watch: bool = False  # also monitor loaders, garbage collection and call counters, for a profile
    table: str = TABLE  # "module:NAME" of the lever table of the Plan
    requested: dict[str, Any] = field(default_factory=dict)  # options of a different entry

    def to_json(self) -> dict[str, Any]:
        return {
            **{k: v for k, v in asdict(self).items() if k not in ("plan", "facts")},
            "plan": self.plan.to_json(),
            "facts": self.facts.to_json(),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrialSpec:
        names = (
            "folder",
            "address",
            "seed",
            "reseed",
            "entry",
            "perturbation",
            "sandbox",
            "watch",
            "table",
            "requested",
        )
        return cls(
            **{n: data[n] for n in names},
            plan=Plan.from_json(data["plan"]),
            facts=Facts.from_json(data["facts"]),
        )


def levers(table: str) -> tuple[Lever, ...]:
    """Return the lever table named by ``module:NAME``."""
    module, name = table.split(":")
    found: tuple[Lever, ...] = getattr(import_module(module), name)
    return found
