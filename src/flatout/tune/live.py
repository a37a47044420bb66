"""The live race: levers switched on and off between blocks of steps, inside the observed program."""

from __future__ import annotations

from flatout.measure.clock import seconds
from flatout.plan.lever import Value
from flatout.plan.plan import Choice, Plan, spell
from flatout.plan.words import Moment, Origin
from flatout.trial.blocks import LeverFailed
from flatout.trial.parent import ProgramGone
from flatout.tune.candidates import LIVE, Candidate, recall
from flatout.tune.race import least_race_s
from flatout.tune.tuning import COMPILE_S, LONGEST_LIVE_S, Tuning, why_gone

LIVE_SHARE = 0.5  # of the exploring; processes need the other half
MOST_PROMISING = (Moment.MODEL, Moment.OPTIMIZER, Moment.STEP, Moment.LOADER, Moment.IMPORT, Moment.PROCESS)


def live_race(tuning: Tuning) -> None:
    """One live lever after another, switched on and off in the observed program; cheap ones first, among them what a profile has asked for.

    A program that comes to its own end meanwhile is started again: that is nobody's fault.
    """
    arena = tuning.arena
    if arena.unit != "step":
        for candidate in tuning.candidates.values():
            if candidate.open and candidate.lever.live and candidate.lever.moment is not Moment.IMPORT:
                candidate.reason = "a step of this program is a closure that lasts seconds; inside it nothing can be switched"
        return
    todo = [c for c in tuning.candidates.values() if c.open and c.lever.live]
    first = tuning.goal.first
    hinted = {name: place for place, name in enumerate(first)}
    todo = recall(sorted(todo, key=lambda c: (c.lever.warms_up, hinted.get(c.lever.name, len(first)), MOST_PROMISING.index(c.lever.moment))),
                  tuning.session.contests)
    left_s = max(0.0, tuning.explore_until_s - seconds())
    # Where a step takes seconds no process could be raced in the other half: then all of it is for the live ones.
    until_s = seconds() + (LIVE_SHARE * left_s if LIVE_SHARE * left_s > least_race_s(tuning, 1) else left_s)
    for at, candidate in enumerate(todo):
        left_s = until_s - seconds()
        if left_s < (COMPILE_S if candidate.lever.warms_up else 6 * arena.block_s):
            continue
        values = candidate.values[:2]
        for value in values:
            share_s = min(LONGEST_LIVE_S, left_s / (len(todo) - at) / len(values))
            if not (_live_contest(tuning, candidate, value, seconds() + share_s) and _observed_again(tuning)):
                return
        tuning.save()


def _observed_again(tuning: Tuning) -> bool:
    """Make sure that a plain program is there to switch levers in; False where none can be had in time."""
    if tuning.observed is not None and tuning.observed in tuning.arena.running:
        return True
    if tuning.explore_until_s - seconds() < tuning.start_cost_s:
        return False
    try:
        tuning.observed = tuning.enter(Plan()).trial
        return True
    except (ProgramGone, LeverFailed):
        return False


def _live_contest(tuning: Tuning, candidate: Candidate, value: Value, until_s: float, again: bool = False) -> bool:
    """False where the program has ended and cannot be had again."""
    plain = tuning.observed
    if plain is None:
        return False
    choice, arena, start_s = Choice(candidate.lever.name, value, Origin.TUNER), tuning.arena, seconds()
    name = spell(choice.name, choice.value)
    tuning.watcher.stage("live race", f"{name}, switched on and off in the running program")
    try:
        if candidate.lever.warms_up:
            arena.switch(plain, (choice,), COMPILE_S)
            for _ in range(3):
                arena.run(plain, 2)
            until_s = max(until_s, seconds() + 8 * arena.block_s)
        ratio = arena.live(plain, (), (choice,), until_s, heard=lambda r: tuning.watcher.contest(name, r))
        arena.switch(plain, ())
    except (LeverFailed, ProgramGone) as error:
        survives = isinstance(error, LeverFailed)
        if isinstance(error, ProgramGone) and error.record.status == "ended":
            arena.dismiss(plain)
            candidate.reason = "the program is too short to measure it"
            return _observed_again(tuning) and (again or _live_contest(tuning, candidate, value, max(until_s, seconds() + 2.0), again=True))
        candidate.reject(why_gone(error) if survives else f"the program does not survive it: {why_gone(error)}")
        tuning.note(name, LIVE, None, candidate.reason, start_s)
        if not survives:
            arena.dismiss(plain)
        return True
    tuning.note(name, LIVE, ratio, "", start_s)
    candidate.measured(value, ratio, LIVE)
    return True
