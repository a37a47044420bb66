"""Types that all packages share: plans, levers, facts, records, requests, errors. Data alone, JSON in and out.

Runs in: every process.
Imports: the standard library only; writing a Plan also imports tomlkit.
Start with: plan.py (Plan, Choice), lever.py (Lever), session.py (the record of a search), run_request.py.
"""

from flatout.schema.enums import Effect, Moment, Origin, Status
from flatout.schema.errors import (
    FlatoutError,
    NothingMeasured,
    PlanError,
    ProgramFailed,
    ProgramNotFound,
    StorageError,
    TrialFailed,
    UsageError,
)
from flatout.schema.facts import Facts, Gpu
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.plan import Choice, Plan, diff, spell

__all__ = [
    "Choice",
    "Effect",
    "Facts",
    "FlatoutError",
    "Gpu",
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
    "Undo",
    "UsageError",
    "Value",
    "diff",
    "spell",
]
