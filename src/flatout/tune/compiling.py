"""A program whose compiler works while others start: then it is measured with and without the compiler, all else equal.

Where memory has no room for it beside others, it works after them.
"""

from __future__ import annotations

import math

from flatout.measure.clock import seconds
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.blame import program_ended
from flatout.tune.conclude import best_measured
from flatout.tune.design import worth_more_time
from flatout.tune.effects import Factor, Space
from flatout.tune.together import Member, Seen, take_turns
from flatout.tune.tuning import COMPILE_S, Tuning

LONGEST_S = 10 * COMPILE_S  # from its start, the times in which it is stopped included
LOOK_S = 0.2
FEWEST_S = {False: 40.0, True: 20.0}  # of exploring that must be left, on few cores and on MANY_CORES: a start, and the compiler on a small model
MANY_CORES = 4  # from here on a compiler hardly holds up those that start meanwhile
ALONE_SHARE = 0.15  # of the budget, for a compiler that is not done, or was not begun, after the last wave
MOST_PROGRAMS = 4  # in memory at once: the observed one, two of a wave, and this one
ALONE_PROGRAMS = 2  # the observed one and this one


class Compiling:
    """One such program at a time, in ``arena.background`` until it is ready. Each factor that warms up for long has its turn, the likeliest first."""

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.trial: Trial | None = None
        self.factor: Factor | None = None  # what is compiled
        self.on: frozenset[str] = frozenset()
        self.begun: set[str] = set()

    @property
    def due(self) -> Factor | None:
        """What is to be compiled next."""
        return min((factor for factor in self.tuning.space.factors if factor.warms_up and factor.key not in self.begun), key=lambda f: f.mean, default=None)

    def begin(self, quick: Space, alone: bool = False) -> None:
        """Beside what is likely to win of the factors that need no long warm-up. ``alone``: no other program is started meanwhile."""
        tuning, factor = self.tuning, self.due
        if self.trial is not None or factor is None or not (alone or self._has_room) or tuning.explore_until_s - seconds() < self._fewest_s:
            return
        if alone and tuning.copies < ALONE_PROGRAMS:
            tuning.keep_observed()
        self.factor = factor
        self.begun.add(factor.key)
        levers = {tuning.choices[key].name: key for key in tuning.fit_of(quick).best()}
        clash = {other for pair in tuning.space.excludes if factor.lever in pair for other in pair}
        self.on = frozenset(key for name, key in levers.items() if name not in clash) | {factor.key}
        plan = tuning.plan_for(self.on)
        tuning.watcher.stage("compiling", plan.describe() if alone else f"{plan.describe()}, while others are measured")
        self.trial = tuning.arena.start(plan, 0)
        tuning.arena.background.append(self.trial)

    @property
    def _has_room(self) -> bool:
        """Whether it fits into memory beside a wave."""
        return self.tuning.copies >= MOST_PROGRAMS

    @property
    def _fewest_s(self) -> float:
        return FEWEST_S[self.tuning.facts.cores >= MANY_CORES]

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
        alone_s = min(COMPILE_S, ALONE_SHARE * self.tuning.budget_s)
        if self.trial is None and (self.due is None or self._has_room or alone_s < self._fewest_s):
            return 0.0
        return alone_s

    def wait(self, quick: Space) -> None:
        """The rest of the time for exploring belongs to compilers alone; where that is too little, their lever says so."""
        self._begin_the_next(quick)
        while self.trial is not None:
            self._wait(self.trial)
            self._begin_the_next(quick)

    def _begin_the_next(self, quick: Space) -> None:
        if not self.tuning.blocks or worth_more_time(self.tuning.refit(), best_measured(self.tuning)):
            self.begin(quick, alone=True)

    def _wait(self, trial: Trial) -> None:
        tuning, factor = self.tuning, self.factor
        assert factor is not None
        tuning.watcher.stage("compiling", tuning.plan_for(self.on).describe())
        trial.go_on()
        while not self.look(LOOK_S):
            if seconds() >= tuning.explore_until_s:
                spent_s = seconds() - trial.started_s
                more = f"give --budget {math.ceil((tuning.budget_s + COMPILE_S) / 60)}m"
                tuning.candidates[factor.lever].reason = f"the compiler was not done after {spent_s:.0f} s; {more}"
                self._end(trial)
                return

    def _end(self, trial: Trial) -> None:
        self.tuning.arena.dismiss(trial)
        self.trial = None
