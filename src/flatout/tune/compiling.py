"""Compiles in a background program while others start, then measures it with and without the compiler.

Without enough memory for both, the compiler runs after the other programs.
"""

from __future__ import annotations

import math

from flatout.measure.clock import seconds
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.blame import program_ended
from flatout.tune.comparison import Member, ProgramResult, take_turns
from flatout.tune.conclude import best_measured
from flatout.tune.design import worth_more_time
from flatout.tune.effects import Factor, Space
from flatout.tune.limits import COMPILE_S
from flatout.tune.tuning import Tuning

LONGEST_S = 10 * COMPILE_S  # since its start, including the time it is stopped
LOOK_S = 0.2
# Least exploring time left, on few cores and on MANY_CORES: a start and compiling a small model
FEWEST_S = {False: 40.0, True: 20.0}
MANY_CORES = 4  # from here on a compiler hardly delays other starting programs
ALONE_SHARE = 0.15  # of the budget, for compiling that is not done, or not begun, after the last wave
MOST_PROGRAMS = 4  # in memory at once: the observed program, two of a wave, and this one
ALONE_PROGRAMS = 2  # the observed program and this one


class Compiling:
    """Runs one compiling program at a time, in ``interleaver.background`` until it is ready.

    Each factor with a long warm-up is compiled once, the most promising first.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.trial: Trial | None = None
        self.factor: Factor | None = None  # the factor being compiled
        self.on: frozenset[str] = frozenset()
        self.begun: set[str] = set()

    @property
    def due(self) -> Factor | None:
        """The factor to compile next."""
        return min(
            (
                factor
                for factor in self.tuning.space.factors
                if factor.warms_up and factor.key not in self.begun
            ),
            key=lambda f: f.mean,
            default=None,
        )

    def begin(self, quick: Space, alone: bool = False) -> None:
        """Start compiling together with the likely best of the other factors.

        ``alone``: no other program starts meanwhile.
        """
        tuning, factor = self.tuning, self.due
        if (
            self.trial is not None
            or factor is None
            or not (alone or self._has_room)
            or tuning.explore_until_s - seconds() < self._fewest_s
        ):
            return
        if alone and tuning.copies < ALONE_PROGRAMS:
            tuning.keep_observed()
        self.factor = factor
        self.begun.add(factor.key)
        levers = {tuning.choices[key].name: key for key in tuning.fit_of(quick).best()}
        clash = {other for pair in tuning.space.excludes if factor.lever in pair for other in pair}
        self.on = frozenset(key for name, key in levers.items() if name not in clash) | {factor.key}
        plan = tuning.plan_for(self.on)
        tuning.stage(
            "compiling", plan.describe() if alone else f"{plan.describe()}, while others are measured"
        )
        self.trial = tuning.interleaver.start(plan, 0)
        tuning.interleaver.background.append(self.trial)

    @property
    def _has_room(self) -> bool:
        """Whether it fits into memory together with a wave."""
        return self.tuning.copies >= MOST_PROGRAMS

    @property
    def _fewest_s(self) -> float:
        return FEWEST_S[self.tuning.facts.cores >= MANY_CORES]

    def look(self, wait_s: float = 0.0) -> bool:
        """Measure it if it is ready. Returns True if there is nothing left to wait for."""
        tuning, trial = self.tuning, self.trial
        if trial is None:
            return True
        try:
            if not trial.is_ready(trial.started_s + LONGEST_S, wait_s):
                return False
            trial.hold(rescan=True)
            tuning.interleaver.background.remove(trial)
            self._measure(trial)
        except ProgramGone as gone:
            program_ended(tuning, self.on, ProgramResult(gone=gone.record))
        self._end(trial)
        return True

    def _measure(self, trial: Trial) -> None:
        tuning, on = self.tuning, self.on
        for left in trial.ready.get("skipped", ()):
            program_ended(tuning, on, ProgramResult(left_out=(left["name"], left["reason"])))
            return
        live = frozenset(key for key in on if tuning.candidates[tuning.choices[key].name].lever.live)
        without = frozenset(
            key for key in live if not tuning.candidates[tuning.choices[key].name].lever.warms_up
        )
        rows = [live, without, without, live, live, without]
        tuning.stage("exploring", f"{tuning.plan_for(on).describe()}: with and without the compiler")
        member = Member(trial, tuning.live_rows(rows), ProgramResult(), fresh=False)
        take_turns(
            tuning.interleaver,
            [member],
            max(tuning.explore_until_s, seconds() + 8 * tuning.interleaver.block_s),
        )
        tuning.processes += 1
        tuning.keep_blocks(tuning.processes, [on - live | row for row in rows], member.seen, 0)
        program_ended(tuning, on, member.seen)

    @property
    def reserved_s(self) -> float:
        """The part of the exploring time reserved for the compiler alone."""
        alone_s = min(COMPILE_S, ALONE_SHARE * self.tuning.budget_s)
        if self.trial is None and (self.due is None or self._has_room or alone_s < self._fewest_s):
            return 0.0
        return alone_s

    def wait(self, quick: Space) -> None:
        """Spend the rest of the exploring time on compilers alone.

        If that is too short, their levers get a reason.
        """
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
        tuning.stage("compiling", tuning.plan_for(self.on).describe())
        trial.go_on()
        while not self.look(LOOK_S):
            if seconds() >= tuning.explore_until_s:
                spent_s = seconds() - trial.started_s
                more = f"give --budget {math.ceil((tuning.budget_s + COMPILE_S) / 60)}m"
                tuning.candidates[
                    factor.lever
                ].reason = f"compilation did not finish within {spent_s:.0f} s; {more}"
                self._end(trial)
                return

    def _end(self, trial: Trial) -> None:
        self.tuning.interleaver.dismiss(trial)
        self.trial = None
