"""Turns the measurements of the search into a plan, and into a reason or a ratio for every lever."""

import math

from flatout.schema.enums import Effect, Status
from flatout.schema.records import QUANTILE, Ratio
from flatout.tune.candidates import (
    DISTURBED,
    LIVE,
    NO_GAIN,
    NO_TIME,
    PROCESSES,
    SLOWER,
    THREADS_DISTURBED,
    Candidate,
)
from flatout.tune.goal import restricted
from flatout.tune.tuning import Tuning

# The chance of being faster that a lever of the plan needs: in general, if it is exact, if it has a warm-up.
MIN_CHANCE, MIN_CHANCE_EXACT, MIN_CHANCE_WARMUP = 0.75, 0.6, 0.9
REPORTED_DATA_SHARE = 0.3  # of a step


def best_measured(tuning: Tuning) -> frozenset[str]:
    """The fastest measured set by expectation.

    A lever whose benefit is uncertain stays out of the plan.
    """
    candidates = {key: tuning.candidates[choice.name] for key, choice in tuning.choices.items()}
    keys = {key for key in tuning.measured_keys if candidates[key].status is not Status.REJECTED}
    if not keys:
        return frozenset()
    fitted = tuning.fit_effects(restricted(tuning.space, keys))
    best = fitted.best()
    if tuning.disturbance.disturbed:
        best = frozenset(key for key in best if not candidates[key].lever.sets_threads)
    while best:
        margin = {key: fitted.effect(key, best).chance - _min_chance(candidates[key]) for key in sorted(best)}
        weakest = min(margin, key=lambda key: margin[key])
        if margin[weakest] >= 0 or not tuning.space.allowed(best - {weakest}):
            break
        best -= {weakest}
    return best


def _min_chance(candidate: Candidate) -> float:
    return (
        MIN_CHANCE_WARMUP
        if candidate.lever.warms_up
        else MIN_CHANCE_EXACT
        if candidate.effect is Effect.EXACT
        else MIN_CHANCE
    )


def conclude(tuning: Tuning) -> list[Candidate]:
    """Give every candidate its result, given the rest of the plan; return the candidates of the plan."""
    for candidate in tuning.candidates.values():
        if candidate.reason in (SLOWER, NO_GAIN, DISTURBED, THREADS_DISTURBED):  # by fewer blocks
            candidate.status, candidate.reason = Status.SKIPPED, ""
    best = best_measured(tuning)
    chosen = {tuning.choices[key].name: key for key in best}
    selected = []
    for candidate in tuning.candidates.values():
        keys = [
            key
            for key, choice in tuning.choices.items()
            if choice.name == candidate.lever.name and key in tuning.measured_keys
        ]
        if not keys or candidate.status is Status.REJECTED:
            candidate.reason = candidate.reason or NO_TIME
            continue
        key = chosen.get(candidate.lever.name) or max(keys, key=lambda key: tuning.effect(key, best).median)
        candidate.value, candidate.ratio = tuning.choices[key].value, tuning.effect(key, best)
        candidate.method = LIVE if candidate.lever.live and tuning.interleaver.unit == "step" else PROCESSES
        if candidate.lever.name in chosen:
            candidate.status = Status.SKIPPED
            candidate.reason = "part of the plan; the search ended before it was confirmed"
            selected.append(candidate)
            continue
        certain = candidate.ratio.low > 1.0 or candidate.ratio.high < 1.0
        threads = candidate.lever.sets_threads
        # The disturbance may be larger than the effect
        if tuning.disturbance.disturbed and (threads or not certain):
            candidate.reject(THREADS_DISTURBED if threads else DISTURBED)
            candidate.ratio = None
        else:
            candidate.reject(SLOWER if candidate.ratio.high < 1.0 else NO_GAIN)
    if best:
        tuning.record_comparison(
            tuning.plan_for(best).describe(),
            "design",
            tuning.gain(best),
            f"{len(tuning.counted_blocks)} blocks of {len(tuning.process_numbers)} processes",
            tuning.start_s,
        )
    else:
        _explain_no_plan(tuning)
    tuning.save()
    return selected


def _explain_no_plan(tuning: Tuning) -> None:
    session, hint = tuning.session, tuning.budget_hint(tuning.budget_s)
    if tuning.choices and not tuning.measured_keys:
        session.undecided, session.obstacle = True, f"no lever could be measured in time; {hint}"
    elif tuning.disturbance.disturbed and any(
        c.reason in (DISTURBED, THREADS_DISTURBED) for c in tuning.candidates.values()
    ):
        session.undecided = True
        session.obstacle = f"{tuning.disturbance.sentence()}, which may hide a speed-up; stop them, or {hint}"


def noise_floor(tuning: Tuning) -> Ratio:
    """The process-to-process variation of the speed of one program, as an interval around 1."""
    fitted = tuning.fitted or tuning.refit()
    spread = math.exp(QUANTILE * math.sqrt(2) * fitted.process_sd)
    return Ratio(1.0, 1 / spread, spread, len(tuning.process_numbers))


def limiting_factor(tuning: Tuning) -> str:
    """What limits the plan and the command that would help; empty if nothing is known."""
    session = tuning.session
    skipped = [
        c
        for c in tuning.candidates.values()
        if c.status is Status.SKIPPED
        and c.values
        and not c.saves_memory
        and (c.reason == NO_TIME or c.lever.warms_up)
    ]
    if skipped:
        names = ", ".join(candidate.lever.name for candidate in skipped)
        return f"{names} could not be measured in time; give --budget {max(2, math.ceil(2 * tuning.budget_s / 60))}m"
    data = session.best.phases.get("data", {}).get("share", 0.0)
    if data >= REPORTED_DATA_SHARE:
        return f"{data:.0%} of a step is spent waiting for data; `flatout profile` shows where"
    return ""
