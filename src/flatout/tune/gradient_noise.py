"""Measures the gradient noise scale of a running program, at its current step or a later one."""

from __future__ import annotations

from collections.abc import Callable

from flatout.measure.clock import seconds
from flatout.measure.noise_scale import noise_scale
from flatout.schema.batch import NoiseSeen
from flatout.trial.parent import Trial
from flatout.tune.batch_programs import TIMEOUT_S

SHARE = 0.15  # of the budget
OBSERVED = 2.0  # times the length of an undisturbed step
LARGEST_SHARE = 0.4  # of the budget, if steps are slow
FEWEST_STEPS, MOST_STEPS = 12, 256


def observe_noise(
    trial: Trial, tick_ms: float, at_step: int, budget_s: float, stage: Callable[[str, str], None]
) -> NoiseSeen:
    """Measure the gradient noise scale; first train on to ``at_step`` if it is ahead. Raises ProgramGone."""
    tick_s = max(tick_ms, 1e-3) / 1000
    ahead = at_step - trial.ticks_done
    if ahead * tick_s > budget_s:
        return NoiseSeen(
            why_not=f"step {at_step:,} is {ahead * tick_s:.0f} s away, beyond the budget; increase --budget"
        )
    if ahead > 0:
        stage("training on", f"to step {at_step:,}, where the gradients are measured")
        trial.go(ahead, seconds() + TIMEOUT_S + 30 * ahead * tick_s)
    if OBSERVED * FEWEST_STEPS * tick_s > LARGEST_SHARE * budget_s:
        return NoiseSeen(
            why_not=f"at least {FEWEST_STEPS} steps are needed, and one lasts {tick_s:.2g} s; increase --budget"
        )
    steps = max(FEWEST_STEPS, min(MOST_STEPS, int(SHARE * budget_s / (OBSERVED * tick_s))))
    stage("measuring", f"the gradients of {steps} steps, with frozen weights")
    recorded = trial.listen("noise", seconds() + TIMEOUT_S + 60 * steps * tick_s, ticks=steps)
    if recorded.get("why_not"):
        return NoiseSeen(step=trial.ticks_done, why_not=recorded["why_not"])
    found = noise_scale(recorded["products"], recorded["squares"], recorded["batch"] or 1)
    return NoiseSeen(
        recorded["step"],
        recorded["batch"],
        recorded["gradients"],
        found.value,
        found.low,
        found.high,
        found.gradient,
        found.trace,
    )
