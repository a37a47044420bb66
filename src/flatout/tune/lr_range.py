"""Runs learning-rate range tests.

Each program trains some plain steps, then one step per point, each with a larger learning rate.

With several optimizers, each one then trains at its suggested learning rate, all for the same computing time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.lr_range import SPAN, read, smoothed, suggest
from flatout.measure.statistics import median
from flatout.plan.errors import NothingMeasured, ProgramFailed
from flatout.plan.facts import Facts
from flatout.plan.folder import JobFolder
from flatout.plan.lr_range import OWN, LrPoint, LrRange, LrRecord, LrTraining, OptimizerWish
from flatout.plan.plan import Plan
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.tuning import why_not

START_S = 600.0  # until the steps are steady
FEWEST = 20  # points; fewer make no curve
TRAINING_STEPS = 400  # of the fastest optimizer, at most
ALIKE = 2  # times the longest warm-up: then every program is steady and starts from the same weights

Stage = Callable[[str, str], None]


class Ranging:
    """The range tests of one command; ``run`` fills the record.

    Raises NothingMeasured and ProgramFailed if the script's own optimizer, or the only requested one, cannot
    be tested. Any other optimizer that fails says why in its test.
    """

    def __init__(self, command: Command, job: JobFolder, facts: Facts, record: LrRecord, budget_s: float, seed: int, stage: Stage) -> None:
        self.command, self.job, self.facts, self.record, self.seed, self.stage = command, job, facts, record, seed, stage
        self.budget_s = budget_s

    def run(self, wishes: Sequence[OptimizerWish], low: float, high: float, steps: int) -> None:
        alone = len(wishes) == 1
        for wish in wishes:
            test = LrRange(wish.text)
            self.record.tests.append(test)
            try:
                self._test(test, wish, low, high, steps, self.budget_s if alone else self.budget_s / (2 * len(wishes)))
            except NothingMeasured as error:
                if alone or wish.name == OWN:
                    raise
                test.why = str(error)
        if not alone:
            self._side_by_side(wishes)
        self.record.status = "done"

    def _test(self, test: LrRange, wish: OptimizerWish, low: float, high: float, steps: int, budget_s: float) -> None:
        def listen(trial: Trial, ready: dict[str, Any]) -> dict[str, Any]:
            affordable = int(1000 * budget_s / max(ready["tick_ms"], 1e-3))
            points = max(FEWEST, min(steps, affordable))
            if points < steps:
                self._note(f"{points} steps instead of {steps}: one takes {ready['tick_ms'] / 1000:.2g} s, and the budget is {budget_s:.0f} s")
            self.stage("raising", f"{wish.text}: the learning rate from {low:g} to {high:g} in {points} steps")
            return self._listen(trial, wish, points, budget_s, low=low, factor=(high / low) ** (1 / (points - 1)))

        heard = self._one_program(wish.text, listen)
        test.warmup_steps, test.groups, test.optimizer, test.step_ms = heard["warmup"], heard["groups"], heard["optimizer"], _step_ms(heard)
        test.points = _points(heard)
        test.steepest, test.lowest, test.diverged = read(test.points)
        test.suggestion, test.why = suggest(test.steepest, test.lowest, test.diverged)
        if len(set(test.groups)) > 1:
            self._note(f"the optimizer has {len(test.groups)} parameter groups with different learning rates; the others kept their proportion to "
                       "the first")

    def _side_by_side(self, wishes: Sequence[OptimizerWish]) -> None:
        """Train with the unchanged script, then with each optimizer at its suggestion."""
        timed = [test.step_ms for test in self.record.tests if test.step_ms]
        entrants = [(OptimizerWish.read(OWN), LrTraining("as it is", as_is=True))]
        entrants += [(wish, LrTraining(wish.text, test.suggestion)) for wish, test in zip(wishes, self.record.tests, strict=True) if test.suggestion]
        if len(entrants) < 2 or not timed:
            return
        compute_s = min(self.budget_s / (2 * len(entrants)), TRAINING_STEPS * min(timed) / 1000)
        self.record.compute_s = compute_s
        start = ALIKE * max(test.warmup_steps for test in self.record.tests)
        for wish, training in entrants:
            step_ms = next((test.step_ms for test in self.record.tests if test.name == wish.text and test.step_ms), min(timed))
            steps = max(FEWEST, round(1000 * compute_s / step_ms))
            self._train(training, wish, steps, compute_s, start)
            self.record.trainings.append(training)

    def _train(self, training: LrTraining, wish: OptimizerWish, steps: int, compute_s: float, start: int) -> None:
        """Train from the weights after ``start`` steps, or a few more until the steps are steady."""
        def listen(trial: Trial, ready: dict[str, Any]) -> dict[str, Any]:
            if ready["ticks"] < start:
                trial.go(start - ready["ticks"], seconds() + START_S)
            self.stage("training", f"{training.name}: {steps} steps")
            return self._listen(trial, wish, steps, compute_s, low=training.lr)

        try:
            heard = self._one_program(training.name, listen)
        except NothingMeasured as error:
            training.why = str(error)
            return
        training.points, training.step_ms = _points(heard), _step_ms(heard)
        training.lr = training.lr or heard["groups"][0]

    def _one_program(self, name: str, listen: Callable[[Trial, dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        with Trial(self.command, self.job.new_trial(), Plan(), self.facts, seed=self.seed) as trial:
            try:
                self.stage("starting", f"{name}: the program as it is, until its steps are steady")
                ready = trial.wait_ready(seconds() + START_S)
                if ready["unit"] != "step":
                    raise NothingMeasured("the learning rate cannot be raised from step to step: a step of this program is a closure that lasts seconds "
                                          "(LBFGS).")
                self.record.device = ready["device"]
                heard = listen(trial, ready)
            except ProgramGone as gone:
                raise why_not(gone.record, "the learning rate could not be raised", "reduce --steps") from None
        if heard.get("why_not"):
            raise NothingMeasured(f"the learning rate cannot be raised: {heard['why_not']}.")
        if heard.get("failed") and len(heard["ms"]) < SPAN:
            raise ProgramFailed(f"the program fails at the learning rate {heard['lr'][-1]:.2g}: {heard['failed']}", 1)
        if heard.get("failed"):
            self._note(f"{name}: the program failed at the learning rate {heard['lr'][-1]:.2g}, after {len(heard['ms'])} steps of the test: {heard['failed']}")
        return {**heard, "warmup": int(ready["ticks"])}

    def _listen(self, trial: Trial, wish: OptimizerWish, ticks: int, longest_s: float, **wishes: Any) -> dict[str, Any]:
        in_place = {} if wish.name == OWN else {"optimizer": wish.name, "options": wish.options}
        return trial.listen("lr range", seconds() + 10 * longest_s + 120, ticks=ticks, **wishes, **in_place)

    def _note(self, note: str) -> None:
        if note not in self.record.notes:
            self.record.notes.append(note)


def _step_ms(heard: dict[str, Any]) -> float | None:
    return median(heard["ms"]) if heard["ms"] else None


def _points(heard: dict[str, Any]) -> list[LrPoint]:
    losses = heard["losses"]
    return [LrPoint(lr, loss, smooth) for lr, loss, smooth in zip(heard["lr"], losses, smoothed(losses), strict=True)]
