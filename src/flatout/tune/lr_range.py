"""Runs a learning-rate range test: some plain steps, then one step per point, each with a larger learning rate."""

from collections.abc import Callable

from flatout.job.folder import JobFolder
from flatout.launch.command import Command
from flatout.measure.clock import seconds
from flatout.measure.lr_range import SLOPE_STEPS, find_rates, smoothed, suggest
from flatout.measure.statistics import median
from flatout.schema.batch import LrPoint, LrRecord
from flatout.schema.errors import NothingMeasured, ProgramFailed
from flatout.schema.facts import Facts
from flatout.schema.plan import Plan
from flatout.trial.parent import ProgramGone, Trial
from flatout.tune.endings import unmeasured_error

START_TIMEOUT_S = 600.0  # until the steps are steady
MIN_POINTS = 20  # fewer make no curve
StageCallback = Callable[[str, str], None]


def lr_range(
    command: Command,
    job: JobFolder,
    facts: Facts,
    record: LrRecord,
    low: float,
    high: float,
    steps: int,
    budget_s: float,
    stage: StageCallback,
) -> None:
    """Fill the record. Raises NothingMeasured and ProgramFailed."""
    stage("starting", "the program as it is, until its steps are steady")
    with Trial(command, job.new_trial(), Plan(), facts) as trial:
        try:
            ready = trial.wait_ready(seconds() + START_TIMEOUT_S)
            if ready["unit"] != "step":
                raise NothingMeasured(
                    "the learning rate cannot be raised from step to step: a step of this program is a closure that lasts seconds (LBFGS)."
                )
            points = max(MIN_POINTS, min(steps, int(1000 * budget_s / max(ready["tick_ms"], 1e-3))))
            stage("raising", f"the learning rate from {low:g} to {high:g} in {points} steps")
            factor = (high / low) ** (1 / (points - 1))
            recorded = trial.run_probe(
                "lr range", seconds() + 10 * budget_s + 120, ticks=points, low=low, factor=factor
            )
        except ProgramGone as gone:
            what = "the learning rate could not be raised"
            raise unmeasured_error(gone.record, what, "Let it train longer, or reduce --steps") from None
    if recorded.get("why_not"):
        raise NothingMeasured(f"the learning rate cannot be raised: {recorded['why_not']}.")
    rates, losses, step_ms = recorded["lr"], recorded["losses"], recorded["ms"]
    if failed := recorded.get("failed"):
        if len(step_ms) <= SLOPE_STEPS:
            raise ProgramFailed(f"the program fails at the learning rate {rates[-1]:.2g}: {failed}", 1)
        record.notes.append(
            f"the program failed at the learning rate {rates[-1]:.2g}, after {len(step_ms)} steps of the test: {failed}"
        )
    if points < steps:
        record.notes.append(
            f"{points} steps instead of {steps}: one takes {ready['tick_ms'] / 1000:.2g} s, and the budget is {budget_s:.0f} s"
        )
    if len(set(recorded["groups"])) > 1:
        record.notes.append("parameter groups with other learning rates kept their proportion to the first")
    record.device, record.warmup_steps = ready["device"], int(ready["ticks"])
    record.groups, record.optimizer = recorded["groups"], recorded["optimizer"]
    record.step_ms = median(step_ms) if step_ms else None
    record.points = [LrPoint(*point) for point in zip(rates, losses, smoothed(losses), strict=True)]
    record.steepest, record.lowest, record.diverged = find_rates(record.points)
    record.suggestion, record.why = suggest(record.steepest, record.lowest, record.diverged)
    record.status = "done"
