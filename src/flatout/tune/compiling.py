"""Compiles in a background program while others start, then measures it with and without the compiler.

Without enough memory for both, the compiler runs after the other programs.
"""

from __future__ import annotations

import math

from flatout.measure.clock import seconds
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.blame import handle_end
from flatout.tune.comparison import Member, ProgramResult, take_turns
from flatout.tune.conclude import best_measured
from flatout.tune.design import worth_more_time
from flatout.tune.effects import Factor, Space
from flatout.tune.limits import COMPILE_S
from flatout.tune.tuning import Tuning

MAX_COMPILE_S = 10 * COMPILE_S  # since its start, including the time it is stopped
POLL_S = 0.2
# Least exploring time left, on few cores and on MANY_CORES: a start and compiling a small model
MIN_REMAINING_S = {False: 40.0, True: 20.0}
MANY_CORES = 4  # from here on a compiler hardly delays other starting programs
SOLE_COMPILE_SHARE = 0.15  # of the budget, for compiling that is not done, or not begun, after the last wave
MIN_COPIES = 4  # in memory at once: the observed program, two of a wave, and this one
MIN_COPIES_ALONE = 2  # the observed program and this one


class BackgroundCompiler:
    """Runs one compiling program at a time, in ``interleaver.background`` until it is ready.

    Each factor with a long warm-up is compiled once, the most promising first.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        self.trial: Trial | None = None
        self.factor: Factor | None = None  # the factor being compiled
        self.active: frozenset[str] = frozenset()
        self.started_keys: set[str] = set()

    @property
    def next_factor(self) -> Factor | None:
        factors = self.tuning.space.factors
        remaining = (f for f in factors if f.warms_up and f.key not in self.started_keys)
        return min(remaining, key=lambda f: f.mean, default=None)

    def begin(self, quick_space: Space, exclusive: bool = False) -> None:
        """Start compiling together with the likely best of the other factors.

        ``exclusive``: no other program starts meanwhile.
        """
        tuning, factor = self.tuning, self.next_factor
        if (
            self.trial is not None
            or factor is None
            or not (exclusive or self._has_room)
            or tuning.explore_until_s - seconds() < self._min_remaining_s
        ):
            return
        if exclusive and tuning.max_copies < MIN_COPIES_ALONE:
            tuning.finish_plain_trial()
        self.factor = factor
        self.started_keys.add(factor.key)
        levers = {tuning.choices[key].name: key for key in tuning.fit_effects(quick_space).best()}
        conflicting = {other for pair in tuning.space.excludes if factor.lever in pair for other in pair}
        self.active = frozenset(key for name, key in levers.items() if name not in conflicting) | {factor.key}
        plan = tuning.plan_for(self.active)
        tuning.stage(
            "compiling", plan.describe() if exclusive else f"{plan.describe()}, while others are measured"
        )
        self.trial = tuning.interleaver.start(plan, 0)
        tuning.interleaver.background.append(self.trial)

    @property
    def _has_room(self) -> bool:
        return self.tuning.max_copies >= MIN_COPIES

    @property
    def _min_remaining_s(self) -> float:
        return MIN_REMAINING_S[self.tuning.facts.cores >= MANY_CORES]

    def poll(self, wait_s: float = 0.0) -> bool:
        """Measure it if it is ready. Returns True if there is nothing left to wait for."""
        tuning, trial = self.tuning, self.trial
        if trial is None:
            return True
        try:
            if not trial.is_ready(trial.started_s + MAX_COMPILE_S, wait_s):
                return False
            trial.pause(rescan=True)
            tuning.interleaver.background.remove(trial)
            self._measure(trial)
        except ProgramGone as gone:
            handle_end(tuning, self.active, ProgramResult(end_record=gone.record))
        self._end(trial)
        return True

    def _measure(self, trial: Trial) -> None:
        tuning, active = self.tuning, self.active
        for skipped in trial.ready.get("skipped", ()):
            handle_end(tuning, active, ProgramResult(failed_lever=(skipped["name"], skipped["reason"])))
            return
        live = frozenset(key for key in active if tuning.candidates[tuning.choices[key].name].lever.live)
        without_compiler = frozenset(
            key for key in live if not tuning.candidates[tuning.choices[key].name].lever.warms_up
        )
        rows = [live, without_compiler, without_compiler, live, live, without_compiler]
        tuning.stage("exploring", f"{tuning.plan_for(active).describe()}: with and without the compiler")
        member = Member(trial, tuning.live_levers(rows), ProgramResult(), fresh=False)
        until_s = max(tuning.explore_until_s, seconds() + 8 * tuning.interleaver.block_s)
        take_turns(tuning.interleaver, [member], until_s)
        tuning.processes += 1
        tuning.add_blocks(tuning.processes, [active - live | row for row in rows], member.result, 0)
        handle_end(tuning, active, member.result)

    @property
    def reserved_s(self) -> float:
        sole_compile_s = min(COMPILE_S, SOLE_COMPILE_SHARE * self.tuning.budget_s)
        if self.trial is None and (
            self.next_factor is None or self._has_room or sole_compile_s < self._min_remaining_s
        ):
            return 0.0
        return sole_compile_s

    def wait(self, quick_space: Space) -> None:
        """Spend the rest of the exploring time on compilers alone.

        If that is too short, their levers get a reason.
        """
        self._begin_next(quick_space)
        while self.trial is not None:
            self._wait_for(self.trial)
            self._begin_next(quick_space)

    def _begin_next(self, quick_space: Space) -> None:
        if not self.tuning.blocks or worth_more_time(self.tuning.refit(), best_measured(self.tuning)):
            self.begin(quick_space, exclusive=True)

    def _wait_for(self, trial: Trial) -> None:
        tuning, factor = self.tuning, self.factor
        assert factor is not None
        tuning.stage("compiling", tuning.plan_for(self.active).describe())
        trial.resume()
        while not self.poll(POLL_S):
            if seconds() >= tuning.explore_until_s:
                spent_s = seconds() - trial.started_s
                hint = f"give --budget {math.ceil((tuning.budget_s + COMPILE_S) / 60)}m"
                tuning.candidates[
                    factor.lever
                ].reason = f"compilation did not finish within {spent_s:.0f} s; {hint}"
                self._end(trial)
                return

    def _end(self, trial: Trial) -> None:
        self.tuning.interleaver.dismiss(trial)
        self.trial = None
