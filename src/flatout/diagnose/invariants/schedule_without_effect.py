"""A schedule of learning rates has no effect.

What:
    A scheduler was made, but it never steps. Or it steps, but its optimizer never does, while another
    optimizer trains the same parameters.
Why it matters:
    The training runs at a constant rate, without warm-up and without decay, and nothing says so.
How to fix it:
    Call `scheduler.step()` after the optimizer's steps, and make the scheduler for the optimizer that steps.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  - scheduled = torch.optim.SGD(model.parameters(), lr=0.1)
  - scheduler = torch.optim.lr_scheduler.StepLR(scheduled, step_size=2)  # <-
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  + scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for epoch in range(5):
        for x in torch.randn(4, 8, 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        scheduler.step()
"""

import sys
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.diagnose.observed_program import parameters_of

MIN_STEPS = 10
MIN_PASSES = 5  # a schedule may step once for several epochs
MIN_TIMES = 3


class ScheduleWithoutEffect(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.times: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # scheduler -> its steps
        self.steps: WeakKeyDictionary[Any, list[Any]] = (
            WeakKeyDictionary()
        )  # optimizer -> steps, lowest and highest rate
        self.line: Line | None = None  # of the latest step

    def scheduler_stepped(self, scheduler: Any) -> None:
        self.times[scheduler] = self.times.get(scheduler, 0) + 1

    def step_ends(self, optimizer: Any) -> None:
        self.line = line_here()
        rate = float(optimizer.param_groups[0].get("lr", 0))
        steps, low, high = self.steps.get(optimizer, (0, rate, rate))
        self.steps[optimizer] = [steps + 1, min(low, rate), max(high, rate)]

    def findings(self) -> Findings:
        kind = self.program.torch.optim.lr_scheduler.LRScheduler
        schedulers = [made for made in list(self.program.made) if isinstance(made, kind)]
        inner = [part for made in schedulers for part in getattr(made, "_schedulers", ())]
        used = [scheduler.optimizer for scheduler in self.times]
        ended = self.program.passes >= MIN_PASSES and not running(self.line)
        for scheduler in schedulers:
            optimizer, name, place = (
                scheduler.optimizer,
                type(scheduler).__name__,
                self.program.line_of(scheduler),
            )
            steps, low, high = self.steps.get(optimizer, (0, 0.0, 0.0))
            other = 0 if steps else self._replaced_by(optimizer)
            unused = optimizer not in used and scheduler not in inner and name != "SWALR"
            if other and self.times.get(scheduler, 0) >= MIN_TIMES:
                yield RULE.finding(
                    f"{name} stepped {self.times[scheduler]} times for an optimizer that never steps; "
                    "another one made "
                    f"{other} steps with the same parameters at a constant rate",
                    place,
                    "make the scheduler for the optimizer that steps",
                )
            elif ended and unused and steps >= MIN_STEPS and low == high:
                yield RULE.finding(
                    f"{name} never stepped, in {self.program.passes} epochs and {steps} steps of its "
                    "optimizer: the "
                    f"rate stayed at {high:g}",
                    place,
                    "scheduler.step()",
                )

    def _replaced_by(self, optimizer: Any) -> int:
        """The steps of another optimizer with the same parameters, whose rate nothing changes."""
        own, groups = (
            {id(p) for p in parameters_of(optimizer)},
            {id(group) for group in optimizer.param_groups},
        )
        for other, (steps, low, high) in self.steps.items():
            apart = not groups & {id(group) for group in other.param_groups}
            if apart and low == high and steps >= MIN_STEPS and own & {id(p) for p in parameters_of(other)}:
                return int(steps)
        return 0


def running(line: Line | None) -> bool:
    """Whether the function of a line is on the stack."""
    frame = sys._getframe(1) if line is not None else None
    while frame is not None and line is not None and frame.f_code is not line[0]:
        frame = frame.f_back
    return frame is not None


RULE = rule(ScheduleWithoutEffect, "FL076", __doc__)
