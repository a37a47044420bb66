"""The winners together, in one program, and each live one taken away again."""

from __future__ import annotations

from flatout.measure.clock import seconds
from flatout.plan.words import Effect, Moment
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.candidates import LIVE, PROCESSES, Candidate, plan_of
from flatout.tune.tuning import LONGEST_LIVE_S, Tuning, why_gone

WORTH_KEEPING = 1.003  # beside the others
WORTH_A_WARM_UP = 1.02


def combine(tuning: Tuning) -> list[Candidate]:
    """The winners together, and each live one taken away again: what is not missed stays off."""
    winners = [c for c in tuning.candidates.values() if c.won] + _untried(tuning)
    if len(winners) < 2 or tuning.copies < 2 or seconds() + tuning.start_cost_s + 6 * tuning.arena.block_s * len(winners) > tuning.explore_until_s:
        return winners
    plan, start_s = plan_of(winners), seconds()
    tuning.watcher.stage("combining", plan.describe())
    try:
        together = tuning.enter(plan)
    except (ProgramGone, LeverFailed) as error:
        tuning.note(plan.describe(), PROCESSES, None, why_gone(error), start_s)
        best = max(winners, key=lambda c: c.median)
        for candidate in winners:
            if candidate is not best:
                candidate.reject(f"it does not work together with {best.lever.name}: {why_gone(error)}")
        return [best]
    try:
        return _take_away(tuning, together.trial, winners)
    finally:
        tuning.arena.dismiss(together.trial)


def _untried(tuning: Tuning) -> list[Candidate]:
    """What there was no time to race, exact and without a warm-up: the time kept for confirming can still tell."""
    live_allowed = tuning.arena.unit == "step"
    likely = [c for c in tuning.candidates.values() if c.open and c.effect is Effect.EXACT and not c.lever.warms_up
              and (live_allowed or c.lever.moment in (Moment.PROCESS, Moment.IMPORT)) and c.lever.moment is not Moment.LOADER]
    for candidate in likely:
        candidate.value, candidate.how, candidate.won = candidate.values[0], "confirmation only", True
    return likely


def _take_away(tuning: Tuning, together: Trial, winners: list[Candidate]) -> list[Candidate]:
    arena, kept = tuning.arena, list(winners)
    live = [c for c in winners if c.lever.live and c.how == LIVE]  # what only processes could tell apart, no live contest can take away
    for at, candidate in enumerate(live):
        left_s = tuning.explore_until_s - seconds()
        if left_s < 6 * arena.block_s or len(kept) < 2:
            break
        on = [c.choice for c in kept if c.lever.live]
        off = [choice for choice in on if choice.name != candidate.lever.name]
        name, start_s = candidate.lever.name, seconds()
        tuning.watcher.stage("taking away", name)
        try:
            ratio = arena.live(together, off, on, seconds() + min(LONGEST_LIVE_S, left_s / (len(live) - at)),
                               heard=lambda r, name=name: tuning.watcher.contest(f"{name}, beside the others", r))  # type: ignore[misc]
        except (LeverFailed, ProgramGone) as error:
            if isinstance(error, ProgramGone) and error.record.status == "ended":
                break  # a short program; nothing speaks against what is left
            candidate.reject(f"it fails together with the others: {why_gone(error)}")
            kept.remove(candidate)
            if isinstance(error, ProgramGone):
                break
            continue
        whole = plan_of(kept).describe()
        tuning.note(whole, LIVE, ratio, "taking away", start_s, against=f"the same without {name}")
        if ratio.median < (WORTH_A_WARM_UP if candidate.lever.warms_up else WORTH_KEEPING):  # ties go to the smaller plan
            kept.remove(candidate)
            candidate.reject(f"beside the others it brings nothing: {ratio.sentence()}")
    return kept
