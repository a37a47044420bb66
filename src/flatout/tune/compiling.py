"""A program whose compiler works while others start: then it is measured with and without the compiler, all else equal."""

from __future__ import annotations

import math

from flatout.measure.clock import seconds
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.blame import program_ended
from flatout.tune.effects import Space
from flatout.tune.together import Member, Seen, take_turns
from flatout.tune.tuning import COMPILE_S, Tuning

LONGEST_S = 10 * COMPILE_S  # from its start, the times in which it is stopped included
LOOK_S = 0.2
FEWEST_S = {False: 40.0, True: 20.0}  # of exploring that must be left, on few cores and on MANY_CORES: a start, and the compiler on a small model
MANY_CORES = 4  # from here on a compiler hardly holds up those that start meanwhile
ALONE_SHARE = 0.15  # of the budget, for a compiler that is not done after the last wave
MOST_PROGRAMS = 4  # in memory at once: the observed one, two of a wave, and this one


class Compiling:
    """At most one such program in a search. It is in ``arena.background`` until it is ready."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.trial: Trial | None = None
        self.on: frozenset[str] = frozenset()
        self.begun = False

    def begin(self, quick: Space) -> None:
        """Once, beside what is likely to win of the factors that need no long warm-up."""
        tuning = self.tuning
        warming = [factor for factor in tuning.space.factors if factor.warms_up]
        left_s = tuning.explore_until_s - seconds()
        if self.begun or not warming or tuning.copies < MOST_PROGRAMS or left_s < FEWEST_S[tuning.facts.cores >= MANY_CORES]:
            return
        self.begun = True
        levers = {tuning.choices[key].name: key for key in tuning.fit_of(quick).best()}
        clash = {other for pair in tuning.space.excludes if warming[0].lever in pair for other in pair}
        self.on = frozenset(key for name, key in levers.items() if name not in clash) | {warming[0].key}
        plan = tuning.plan_for(self.on)
        tuning.watcher.stage("compiling", f"{plan.describe()}, while others are measured")
        self.trial = tuning.arena.start(plan, 0)
        tuning.arena.background.append(self.trial)

    def look(self, wait_s: float = 0.0) -> bool:
        """Measure it if it is ready. True once there is nothing to wait for."""
        tuning, trial = self.tuning, self.trial
        if trial is None:
            return True
        try:
            if not trial.is_ready(trial.started_s + LONGEST_S, wait_s):
                return False
            trial.hold(look_again=True)
            tuning.arena.background.remove(trial)
            self._measure(trial)
        except ProgramGone as gone:
            program_ended(tuning, self.on, Seen(gone=gone.record))
        self._end(trial)
        return True

    def _measure(self, trial: Trial) -> None:
        tuning, on = self.tuning, self.on
        for left in trial.ready.get("skipped", ()):
            program_ended(tuning, on, Seen(left_out=(left["name"], left["reason"])))
            return
        live = frozenset(key for key in on if tuning.candidates[tuning.choices[key].name].lever.live)
        without = frozenset(key for key in live if not tuning.candidates[tuning.choices[key].name].lever.warms_up)
        rows = [live, without, without, live, live, without]
        tuning.watcher.stage("exploring", f"{tuning.plan_for(on).describe()}: with and without the compiler")
        member = Member(trial, tuning.live_rows(rows), Seen(), fresh=False)
        take_turns(tuning.arena, [member], max(tuning.explore_until_s, seconds() + 8 * tuning.arena.block_s))
        tuning.processes += 1
        tuning.keep_blocks(tuning.processes, [on - live | row for row in rows], member.seen, 0)
        program_ended(tuning, on, member.seen)

    @property
    def reserved_s(self) -> float:
        """Of the time for exploring, what is kept for the compiler alone."""
        if self.trial is None:
            return 0.0
        return min(COMPILE_S, ALONE_SHARE * self.tuning.budget_s)

    def wait(self) -> None:
        """The rest of the time for exploring belongs to the compiler alone; where that is too little, its lever says so."""
        tuning, trial = self.tuning, self.trial
        if trial is None:
            return
        tuning.watcher.stage("compiling", tuning.plan_for(self.on).describe())
        trial.go_on()
        while not self.look(LOOK_S):
            if seconds() >= tuning.explore_until_s:
                name = next(factor.lever for factor in tuning.space.factors if factor.warms_up)
                spent_s = seconds() - trial.started_s
                more = f"give --budget {math.ceil((tuning.budget_s + COMPILE_S) / 60)}m"
                tuning.candidates[name].reason = f"the compiler was not done after {spent_s:.0f} s; {more}"
                self._end(trial)

    def _end(self, trial: Trial) -> None:
        self.tuning.arena.dismiss(trial)
        self.trial = None
