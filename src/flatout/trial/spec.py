"""The specification of a trial: ``spec.json`` in its folder, read by every process of the program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import import_module
from typing import Any

from flatout.schema.facts import Facts
from flatout.schema.lever import Lever
from flatout.schema.plan import Plan

ENTRY = "flatout.trial.worker:attach"
TABLE = "flatout.levers:TABLE"


@dataclass(frozen=True)
class TrialOptions:
    """How a trial runs. ``seed`` None leaves the program's randomness alone; ``show`` shows its output.

    ``perturbation`` perturbs rounding from the first step on, by this share (flatout.guard.perturb), to see
    how far the program amplifies it.
    """

    seed: int | None = 0
    show: bool = False
    reseed: bool = False  # add the seed to the program's own seeds, so that another seed gives another run
    entry: str = ENTRY
    perturbation: float = 0.0
    monitor: bool = False  # also monitor loaders, garbage collection and call counters, for a profile
    table: str = TABLE  # "module:NAME" of the lever table of the Plan
    requested: Mapping[str, Any] = field(default_factory=dict)  # options of a different entry
    hold: bool = False  # wait for the plan before the program touches a device or makes a loader
    checked_steps: int = (
        0  # first steps with deterministic kernels, and of the live levers only the exact ones
    )
    sketches: bool = False  # also record sketches of all weights (flatout.measure.parity)


DEFAULT_OPTIONS = TrialOptions()


@dataclass(frozen=True, kw_only=True)
class TrialSpec(TrialOptions):
    """A trial, for the program. ``address`` is the parent's socket."""

    folder: str
    address: str
    plan: Plan = field(default_factory=Plan)
    facts: Facts = field(default_factory=Facts)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "plan": self.plan.to_json(), "facts": self.facts.to_json()}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TrialSpec:
        values = {f.name: data[f.name] for f in fields(cls)}
        return cls(
            **{**values, "plan": Plan.from_json(data["plan"]), "facts": Facts.from_json(data["facts"])}
        )


def levers(table: str) -> Iterable[Lever]:
    """The lever table named by ``module:NAME``."""
    module, name = table.split(":")
    table_levers: Iterable[Lever] = getattr(import_module(module), name)
    return table_levers
