"""The budget of a search when you give none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist

from flatout.schema.lever import Value
from flatout.tune.candidates import Candidate
from flatout.tune.prior import Prior

USUAL_BUDGET_S = 90.0
# For a slow start, long steps, a request beyond a plan, or a compiler that is worth its time
LONGER_BUDGET_S = 300.0
QUICK_START_S, QUICK_STEP_MS = 10.0, 100.0
WORTH = 3.0  # times the longer search: its time is certain, the length of the job is a guess


def default_budget_s(start_s: float, step_ms: float, more: bool, compiler_saves_s: float) -> float:
    """The longer budget for slow programs, for ``more`` than a plan, or for a compiler that saves its cost."""
    quick = start_s <= QUICK_START_S and step_ms <= QUICK_STEP_MS
    worth_it = compiler_saves_s > WORTH * (LONGER_BUDGET_S - USUAL_BUDGET_S)
    return USUAL_BUDGET_S if quick and not more and not worth_it else LONGER_BUDGET_S


def gain_of_compilers(candidates: Iterable[Candidate], prior: Callable[[str, Value], Prior]) -> float:
    """The share of time that the best lever with a long warm-up is expected to save."""
    return max(
        (
            expected_gain(prior(candidate.lever.name, value))
            for candidate in candidates
            if candidate.open and candidate.lever.warms_up
            for value in candidate.values
        ),
        default=0.0,
    )


def expected_gain(prior: Prior) -> float:
    """The expected share of time saved, where a lever that is slower is not kept: E[max(0, 1 - exp(x))]."""
    below, normal = -prior.mean / prior.sd, NormalDist()
    return normal.cdf(below) - math.exp(prior.mean + prior.sd**2 / 2) * normal.cdf(below - prior.sd)
