"""Runs learning-rate range tests.

Each program trains some plain steps, then one step per point, each with a larger learning rate.

With several optimizers, each one then trains at its suggested learning rate, all for the same computing time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.lr_range import SPAN, read, smoothed, suggest
from flatout.measure.statistics import median
from flatout.schema.errors import NothingMeasured, ProgramFailed
from flatout.schema.facts import Facts
from flatout.schema.lr_range import OWN, LrPoint, LrRange, LrRecord, LrTraining, OptimizerOption
from flatout.schema.plan import Plan
from flatout.trial.parent import ProgramGone, Trial
from flatout.trial.spec import TrialOptions
from flatout.tune.gone import why_not

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

    def __init__(
        self,
        command: Command,
        job: JobFolder,
        facts: Facts,
        record: LrRecord,
        budget_s: float,
        seed: int,
        stage: Stage,
    ) -> None:
        self.command, self.job, self.facts, self.record, self.seed = command, job, facts, record, seed
        self.stage = stage
        self.budget_s = budget_s

    def run(self, requested: Sequence[OptimizerOption], low: float, high: float, steps: int) -> None:
        alone = len(requested) == 1
        for request in requested:
            test = LrRange(request.text)
            self.record.tests.append(test)
            try:
                self._test(
                    test,
                    request,
                    low,
                    high,
                    steps,
                    self.budget_s if alone else self.budget_s / (2 * len(requested)),
                )
            except NothingMeasured as error:
                if alone or request.name == OWN:
                    raise
                test.why = str(error)
        if not alone:
            self._side_by_side(requested)
        self.record.status = "done"

    def _test(
        self, test: LrRange, request: OptimizerOption, low: float, high: float, steps: int, budget_s: float
    ) -> None:
        def listen(trial: Trial, ready: dict[str, Any]) -> dict[str, Any]:
            affordable = int(1000 * budget_s / max(ready["tick_ms"], 1e-3))
            points = max(FEWEST, min(steps, affordable))
            if points < steps:
                self._note(
                    f"{points} steps instead of {steps}: one takes {ready['tick_ms'] / 1000:.2g} s, and the budget is {budget_s:.0f} s"
                )
            self.stage(
                "raising", f"{request.text}: the learning rate from {low:g} to {high:g} in {points} steps"
            )
            return self._listen(
                trial, request, points, budget_s, low=low, factor=(high / low) ** (1 / (points - 1))
            )

        recorded = self._one_program(request.text, listen)
        test.warmup_steps, test.groups, test.optimizer, test.step_ms = (
            recorded["warmup"],
            recorded["groups"],
            recorded["optimizer"],
            _step_ms(recorded),
        )
        test.points = _points(recorded)
        test.steepest, test.lowest, test.diverged = read(test.points)
        test.suggestion, test.why = suggest(test.steepest, test.lowest, test.diverged)
        if len(set(test.groups)) > 1:
            self._note(
                f"the optimizer has {len(test.groups)} parameter groups with different learning rates; the others kept their proportion to "
                "the first"
            )

    def _side_by_side(self, requested: Sequence[OptimizerOption]) -> None:
        """Train with the unchanged script, then with each optimizer at its suggestion."""
        timed = [test.step_ms for test in self.record.tests if test.step_ms]
        candidates = [(OptimizerOption.read(OWN), LrTraining("as it is", as_is=True))]
        candidates += [
            (request, LrTraining(request.text, test.suggestion))
            for request, test in zip(requested, self.record.tests, strict=True)
            if test.suggestion
        ]
        if len(candidates) < 2 or not timed:
            return
        compute_s = min(self.budget_s / (2 * len(candidates)), TRAINING_STEPS * min(timed) / 1000)
        self.record.compute_s = compute_s
        start = ALIKE * max(test.warmup_steps for test in self.record.tests)
        for request, training in candidates:
            step_ms = next(
                (test.step_ms for test in self.record.tests if test.name == request.text and test.step_ms),
                min(timed),
            )
            steps = max(FEWEST, round(1000 * compute_s / step_ms))
            self._train(training, request, steps, compute_s, start)
            self.record.trainings.append(training)

    def _train(
        self, training: LrTraining, request: OptimizerOption, steps: int, compute_s: float, start: int
    ) -> None:
        """Train from the weights after ``start`` steps, or a few more until the steps are steady."""

        def listen(trial: Trial, ready: dict[str, Any]) -> dict[str, Any]:
            if ready["ticks"] < start:
                trial.go(start - ready["ticks"], seconds() + START_S)
            self.stage("training", f"{training.name}: {steps} steps")
            return self._listen(trial, request, steps, compute_s, low=training.lr)

        try:
            recorded = self._one_program(training.name, listen)
        except NothingMeasured as error:
            training.why = str(error)
            return
        training.points, training.step_ms = _points(recorded), _step_ms(recorded)
        training.lr = training.lr or recorded["groups"][0]

    def _one_program(
        self, name: str, listen: Callable[[Trial, dict[str, Any]], dict[str, Any]]
    ) -> dict[str, Any]:
        with Trial(
            self.command, self.job.new_trial(), Plan(), self.facts, TrialOptions(seed=self.seed)
        ) as trial:
            try:
                self.stage("starting", f"{name}: the program as it is, until its steps are steady")
                ready = trial.wait_ready(seconds() + START_S)
                if ready["unit"] != "step":
                    raise NothingMeasured(
                        "the learning rate cannot be raised from step to step: a step of this program is a closure that lasts seconds "
                        "(LBFGS)."
                    )
                self.record.device = ready["device"]
                recorded = listen(trial, ready)
            except ProgramGone as gone:
                raise why_not(
                    gone.record, "the learning rate could not be raised", "reduce --steps"
                ) from None
        if recorded.get("why_not"):
            raise NothingMeasured(f"the learning rate cannot be raised: {recorded['why_not']}.")
        if recorded.get("failed") and len(recorded["ms"]) < SPAN:
            raise ProgramFailed(
                f"the program fails at the learning rate {recorded['lr'][-1]:.2g}: {recorded['failed']}", 1
            )
        if recorded.get("failed"):
            self._note(
                f"{name}: the program failed at the learning rate {recorded['lr'][-1]:.2g}, after {len(recorded['ms'])} steps of the test: {recorded['failed']}"
            )
        return {**recorded, "warmup": int(ready["ticks"])}

    def _listen(
        self, trial: Trial, request: OptimizerOption, ticks: int, longest_s: float, **requested: object
    ) -> dict[str, Any]:
        in_place = {} if request.name == OWN else {"optimizer": request.name, "options": request.options}
        return trial.listen(
            "lr range", seconds() + 10 * longest_s + 120, ticks=ticks, **requested, **in_place
        )

    def _note(self, note: str) -> None:
        if note not in self.record.notes:
            self.record.notes.append(note)


def _step_ms(recorded: dict[str, Any]) -> float | None:
    return median(recorded["ms"]) if recorded["ms"] else None


def _points(recorded: dict[str, Any]) -> list[LrPoint]:
    losses = recorded["losses"]
    return [
        LrPoint(lr, loss, smooth)
        for lr, loss, smooth in zip(recorded["lr"], losses, smoothed(losses), strict=True)
    ]
