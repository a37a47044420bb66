"""What exploring has shown: the plan that is expected to be fastest, and a sentence or a ratio for every lever."""

from __future__ import annotations

import math

from flatout.plan.records import QUANTILE, Ratio
from flatout.plan.words import Effect, Status
from flatout.tune.candidates import LIVE, NO_GAIN, NO_TIME, PROCESSES, SLOWER, Candidate
from flatout.tune.tuning import Tuning, only

LIKELY, LIKELY_EXACT, LIKELY_WARM = 0.75, 0.6, 0.9  # the chance of being faster that a lever of the plan must have; where it changes no bit; where it warms up
DATA_SHARE = 0.3  # of a step, from where on it is worth saying
WORTH_A_LEVER = 0.003  # of log time

def best_measured(tuning: Tuning) -> frozenset[str]:
    """The set that is expected to be fastest, of what was really measured. What is about as likely to help as not stays out of the plan."""
    if not tuning.measured:
        return frozenset()
    fitted = tuning.fit_of(only(tuning.space, tuning.measured))
    best = fitted.best(WORTH_A_LEVER)
    while best:
        spare = {key: fitted.effect(key, best).chance - _needed(tuning.candidates[tuning.choices[key].name]) for key in sorted(best)}
        least = min(spare, key=lambda key: spare[key])
        if spare[least] >= 0 or not tuning.space.allowed(best - {least}):
            break
        best -= {least}
    return best


def _needed(candidate: Candidate) -> float:
    """The chance of being faster that it must have to be in the plan."""
    return LIKELY_WARM if candidate.lever.warms_up else LIKELY_EXACT if candidate.effect is Effect.EXACT else LIKELY


def conclude(tuning: Tuning) -> list[Candidate]:
    """Tell every candidate what was found of it, beside the rest of the plan; the candidates of the plan."""
    best = best_measured(tuning)
    chosen = {tuning.choices[key].name: key for key in best}
    found = []
    for candidate in tuning.candidates.values():
        keys = [key for key, choice in tuning.choices.items() if choice.name == candidate.lever.name and key in tuning.measured]
        if not keys or candidate.status is Status.REJECTED:
            candidate.reason = candidate.reason or NO_TIME
            continue
        key = chosen.get(candidate.lever.name) or max(keys, key=lambda key: tuning.effect(key, best).median)
        candidate.value, candidate.ratio = tuning.choices[key].value, tuning.effect(key, best)
        candidate.how = LIVE if candidate.lever.live and tuning.arena.unit == "step" else PROCESSES
        if candidate.lever.name in chosen:
            candidate.status, candidate.reason = Status.SKIPPED, "part of the plan; the search ended before it was confirmed"
            found.append(candidate)
            continue
        clear = candidate.ratio.low > 1.0 or candidate.ratio.high < 1.0
        candidate.reject(SLOWER if candidate.ratio.high < 1.0 else NO_GAIN)
        if tuning.disturbance.disturbed and not clear:  # what others did to it may be larger than the effect
            candidate.ratio = None
    if best:
        tuning.note(tuning.plan_for(best).describe(), "design", tuning.gain(best), f"{len(tuning.blocks)} blocks of {len(tuning.numbers)} processes",
                    tuning.start_s)
    else:
        _say_why_nothing(tuning)
    tuning.save()
    return found


def _say_why_nothing(tuning: Tuning) -> None:
    """Whether the plain program stays because nothing is faster, or because that could not be seen."""
    session, more = tuning.session, f"give --budget {tuning.enough_m(tuning.budget_s)}m"
    if tuning.choices and not tuning.measured:
        session.undecided, session.obstacle = True, f"there was no time to measure a lever; {more}"
    elif tuning.disturbance.disturbed and any(c.ratio is None and c.status is Status.REJECTED and c.reason == NO_GAIN for c in tuning.candidates.values()):
        session.undecided = True
        session.obstacle = f"{tuning.disturbance.sentence()}, and no gain stands out from what they may have done to it; stop them, or {more}"


def noise_of(tuning: Tuning) -> Ratio:
    """How far two processes of one program are apart here, as an interval around 1."""
    fitted = tuning.fitted or tuning.refit()
    apart = math.exp(QUANTILE * math.sqrt(2) * fitted.luck)
    return Ratio(1.0, 1 / apart, apart, len(tuning.numbers))


def obstacle(tuning: Tuning) -> str:
    """What stands in the way of more than the plan that was found, with the command that would help; empty where nothing is known to."""
    session = tuning.session
    late = [c for c in tuning.candidates.values() if c.status is Status.SKIPPED and c.values and not c.for_memory and (c.reason == NO_TIME or c.lever.warms_up)]
    if late:
        names = ", ".join(candidate.lever.name for candidate in late)
        return f"{names} had no time to be measured; give --budget {max(2, math.ceil(2 * tuning.budget_s / 60))}m"
    data = session.best.phases.get("data", {}).get("share", 0.0)
    if data >= DATA_SHARE:
        return f"{data:.0%} of a step still waits for data; `flatout profile` shows where"
    return ""
