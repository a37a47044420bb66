"""Levers against the plain program: live ones inside it, the others in processes of their own; then the winners together."""

from __future__ import annotations

import math

from flatout.measure.clock import seconds
from flatout.plan.lever import Value
from flatout.plan.plan import Choice, Plan, spell
from flatout.plan.records import Ratio
from flatout.plan.words import Effect, Moment, Origin
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.arena import Entrant, LeverFailed
from flatout.tune.candidates import Candidate, plan_of, recall
from flatout.tune.tuning import Tuning, why_gone

LIVE_SHARE = 0.5  # of the exploring; processes need the other half
LONGEST_LIVE_S = 12.0
MOST_PROMISING = (Moment.MODEL, Moment.OPTIMIZER, Moment.STEP, Moment.LOADER, Moment.IMPORT, Moment.PROCESS)
COMPILE_S = 75.0  # what a first compilation is given
MOST_ENTRANTS = 7
BESIDE_THE_ENTRANTS = 2  # the observed program, and a young plain one
FEWEST_RACE_ROUNDS = 4  # rather fewer programs than fewer rounds
RACE_ROUNDS = 12
VALUES_A_LEVER = 4
OLD_TICKS = 50


def live_race(tuning: Tuning) -> None:
    """One live lever after another, switched on and off in the observed program; cheap ones first.

    A program that comes to its own end meanwhile is started again: that is nobody's fault.
    """
    arena = tuning.arena
    if arena.unit != "step":
        return  # inside a closure nothing may be switched
    todo = [c for c in tuning.candidates.values() if c.open and c.lever.live]
    todo = recall(sorted(todo, key=lambda c: (c.lever.warms_up, MOST_PROMISING.index(c.lever.moment))), tuning.session.contests)
    left_s = max(0.0, tuning.explore_until_s - seconds())
    # Where a step takes seconds no process could be raced in the other half: then all of it is for the live ones.
    until_s = seconds() + (LIVE_SHARE * left_s if LIVE_SHARE * left_s > _least_race_s(tuning, 1) else left_s)
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
        tuning.note(name, "live", None, candidate.reason, start_s)
        if not survives:
            arena.dismiss(plain)
        return True
    tuning.note(name, "live", ratio, "", start_s)
    candidate.measured(value, ratio, "live")
    return True


def process_race(tuning: Tuning) -> None:
    """Levers that act before the program starts, or while its loaders are made; and A/A, the plain program again."""
    arena = tuning.arena
    closed = arena.unit != "step"  # where nothing can be switched live, early levers race here
    levers = [c for c in tuning.candidates.values() if c.open and (not c.lever.live or (closed and c.lever.moment is Moment.IMPORT))]
    levers = recall(levers, tuning.session.contests)
    wanted: list[tuple[Candidate | None, Value]] = [(c, v) for depth in range(VALUES_A_LEVER) for c in levers for v in c.values[depth:depth + 1]]
    if tuning.session.noise_floor is None:
        wanted.insert(min(2, len(wanted)), (None, True))
    entrants: list[tuple[Candidate | None, Value, Entrant]] = []
    most = min(MOST_ENTRANTS, tuning.copies - BESIDE_THE_ENTRANTS)
    if most < 1:
        for left_out in levers:
            left_out.reason = "too few programs like this one fit into memory at once to race it"
    for candidate, value in wanted[:max(0, most)]:
        if tuning.explore_until_s - seconds() < _least_race_s(tuning, len(entrants) + 1):
            break
        entrant = _start(tuning, candidate, value)
        if entrant is not None:
            entrants.append((candidate, value, entrant))
    if entrants:
        reference = _reference(tuning)
        if reference is not None:
            _take_turns(tuning, reference, entrants)
        for _, _, entrant in entrants:
            arena.dismiss(entrant.trial)


def _least_race_s(tuning: Tuning, entrants: int) -> float:
    """What it takes to start one more program (and a young plain one), and for a few rounds of all of them."""
    return 2 * tuning.start_cost_s + FEWEST_RACE_ROUNDS * tuning.arena.block_s * (entrants + 2)


def _reference(tuning: Tuning) -> Trial | None:
    """The plain program that the others race against: as young as they are. Episodes lengthen and caches fill as training goes on."""
    old = tuning.observed if tuning.observed in tuning.arena.running else None
    if old is not None and (old.ticks_run <= OLD_TICKS or tuning.explore_until_s - seconds() < 2 * tuning.start_cost_s):
        return old
    try:
        return tuning.enter(Plan()).trial
    except (ProgramGone, LeverFailed):
        return old


def _start(tuning: Tuning, candidate: Candidate | None, value: Value) -> Entrant | None:
    plan = Plan() if candidate is None else Plan((Choice(candidate.lever.name, value, Origin.TUNER),))
    tuning.watcher.stage("starting", "the plain program again (A/A)" if candidate is None else f"a program with {plan.describe()}")
    start_s = seconds()
    try:
        return tuning.enter(plan, patience_s=60 + 4 * tuning.start_cost_s)
    except (ProgramGone, LeverFailed) as error:
        if candidate is not None:
            if candidate.ratio is None:
                candidate.reject(f"the program does not survive it: {why_gone(error)}" if isinstance(error, ProgramGone) else why_gone(error))
            tuning.note(plan.describe(), "processes", None, why_gone(error), start_s)
        return None


def _take_turns(tuning: Tuning, plain: Trial, entrants: list[tuple[Candidate | None, Value, Entrant]]) -> None:
    arena, start_s = tuning.arena, seconds()
    tuning.watcher.stage("race", f"{len(entrants)} programs take turns with the plain one")
    names = {id(e): "A/A" if c is None else e.plan.describe() for c, _, e in entrants}
    left_s = tuning.explore_until_s - seconds()
    kept_s = tuning.start_cost_s + 20 * arena.block_s  # for taking winners away again
    until_s = seconds() + min(max(RACE_ROUNDS * arena.block_s * (len(entrants) + 2), 15.0), max(left_s - kept_s, 0.6 * left_s))
    verdicts = arena.processes(plain, [e for _, _, e in entrants], until_s, heard=lambda e, r: tuning.watcher.contest(names[id(e)], r))
    twin = next((verdicts[at] for at, (candidate, _, _) in enumerate(entrants) if candidate is None), None)
    if isinstance(twin, Ratio):
        tuning.session.noise_floor, tuning.floor = twin, max(0.01, abs(math.log(twin.median)))
        # Two processes of one program differ by luck. The mean of both plain ones is a fairer measure than either.
        luck = math.sqrt(twin.median)
        verdicts = {at: v.against(luck) if isinstance(v, Ratio) and v is not twin else v for at, v in verdicts.items()}
    for at, (candidate, value, entrant) in enumerate(entrants):
        verdict, name = verdicts[at], names[id(entrant)]
        if isinstance(verdict, str):
            if candidate is not None and candidate.ratio is None:
                candidate.reject(f"the program does not survive it: {verdict}")
            tuning.note(name, "processes", None, verdict, start_s)
            continue
        tuning.note(name, "processes", verdict, "", start_s)
        if candidate is not None:
            candidate.measured(value, verdict, "processes")
    if plain is not tuning.observed:
        arena.dismiss(plain)
    tuning.save()


def combine(tuning: Tuning) -> list[Candidate]:
    """The winners together, and each live one taken away again: what is not missed stays off."""
    winners = [c for c in tuning.candidates.values() if c.won] + _untried(tuning)
    if len(winners) < 2 or seconds() + tuning.start_cost_s + 6 * tuning.arena.block_s * len(winners) > tuning.explore_until_s:
        return winners
    plan, start_s = plan_of(winners), seconds()
    tuning.watcher.stage("combining", plan.describe())
    try:
        together = tuning.enter(plan)
    except (ProgramGone, LeverFailed) as error:
        tuning.note(plan.describe(), "processes", None, why_gone(error), start_s)
        best = max(winners, key=lambda c: c.ratio.median if c.ratio else 0.0)
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
    live = [c for c in winners if c.lever.live and arena.unit == "step"]
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
            candidate.reject(f"it fails together with the others: {why_gone(error)}")
            kept.remove(candidate)
            if isinstance(error, ProgramGone):
                break
            continue
        whole = plan_of(kept).describe()
        tuning.note(whole, "live", ratio, "taking away", start_s, against=f"the same without {name}")
        if ratio.median < 1.003:  # ties go to the smaller plan
            kept.remove(candidate)
            candidate.reject(f"beside the others it brings nothing: {ratio.sentence()}")
    return kept
