"""The budget of a search when you give none."""

import math
from collections.abc import Callable, Iterable
from statistics import NormalDist

from flatout.schema.lever import Value
from flatout.tune.candidates import Candidate
from flatout.tune.prior import Prior

USUAL_BUDGET_S = 90.0
COMPILER_BUDGET_S = 180.0  # has time for a compiler, also after slow starts
# For a slow start, long steps, a request beyond a plan, or a compiler that saves much
LONGER_BUDGET_S = 300.0
QUICK_START_S, QUICK_STEP_MS = 10.0, 100.0
MIN_PAYBACK = 3.0  # times the longer search: its time is certain, the length of the job is a guess


def default_budget_s(start_s: float, step_ms: float, beyond_plan: bool, compiler_saves_s: float) -> float:
    """The longer budget for slow programs and for a request ``beyond_plan``; else by what a compiler saves."""
    quick = start_s <= QUICK_START_S and step_ms <= QUICK_STEP_MS
    if not quick or beyond_plan or compiler_saves_s > MIN_PAYBACK * (LONGER_BUDGET_S - USUAL_BUDGET_S):
        return LONGER_BUDGET_S
    return COMPILER_BUDGET_S if compiler_saves_s > COMPILER_BUDGET_S - USUAL_BUDGET_S else USUAL_BUDGET_S


def compiler_gain(candidates: Iterable[Candidate], prior: Callable[[str, Value], Prior]) -> float:
    """The share of time that the best lever with a long warm-up is expected to save."""
    return max(
        (
            expected_gain(prior(candidate.lever.name, value))
            for candidate in candidates
            if candidate.selectable and candidate.lever.warms_up
            for value in candidate.values
        ),
        default=0.0,
    )


def expected_gain(prior: Prior) -> float:
    """The expected share of time saved, where a lever that is slower is not kept: E[max(0, 1 - exp(x))]."""
    z_zero, normal = -prior.mean / prior.sd, NormalDist()
    return normal.cdf(z_zero) - math.exp(prior.mean + prior.sd**2 / 2) * normal.cdf(z_zero - prior.sd)
