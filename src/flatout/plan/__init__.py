"""Shared types of flatout: plans, levers, facts, records, errors, paths of a job folder.

Runs in: every process.
Imports: the standard library only; writing a Plan also imports tomlkit.
Start with: plan.py (Plan, Choice), lever.py (Lever), records.py (measurements).
"""

from flatout.plan.enums import Effect, Moment, Origin, Status
from flatout.plan.errors import (
    FlatoutError,
    NothingMeasured,
    PlanError,
    ProgramFailed,
    ProgramNotFound,
    StorageError,
    TrialFailed,
    UsageError,
)
from flatout.plan.facts import Facts, Gpu
from flatout.plan.folder import JobFolder, TrialFolder
from flatout.plan.lever import Lever, Options, Skip, Undo, Value
from flatout.plan.plan import Choice, Plan, diff, spell

__all__ = [
    "Choice",
    "Effect",
    "Facts",
    "FlatoutError",
    "Gpu",
    "JobFolder",
    "Lever",
    "Moment",
    "NothingMeasured",
    "Options",
    "Origin",
    "Plan",
    "PlanError",
    "ProgramFailed",
    "ProgramNotFound",
    "Skip",
    "Status",
    "StorageError",
    "TrialFailed",
    "TrialFolder",
    "Undo",
    "UsageError",
    "Value",
    "diff",
    "spell",
]
