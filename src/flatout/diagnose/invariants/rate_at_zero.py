"""The learning rate reaches 0 long before the end.

What:
    The schedule has brought the rate below a millionth of its maximum, and the optimizer steps on at this
    rate.
Why it matters:
    The weights stand still for the rest of the run. All its time is lost, and the loss looks converged.
How to fix it:
    Give the schedule the number of steps that really happen: batches per epoch times epochs. Step it once
    per epoch if its decay counts epochs.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)  # <-
  + scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.98)
    for x in torch.randn(80, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        scheduler.step()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule

MIN_STEPS = 20
MIN_SHARE = 0.25  # of all steps
ZERO = 1e-6  # of the highest rate


class RateAtZero(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.schedulers: WeakKeyDictionary[Any, Any] = (
            WeakKeyDictionary()
        )  # optimizer -> a scheduler that steps
        self.steps: WeakKeyDictionary[Any, list[float]] = (
            WeakKeyDictionary()
        )  # all, the last ones at 0, highest rate

    def scheduler_stepped(self, scheduler: Any) -> None:
        optimizer = getattr(scheduler, "optimizer", None)
        if optimizer is not None and type(scheduler).__name__ != "ReduceLROnPlateau":
            self.schedulers[optimizer] = scheduler

    def step_begins(self, optimizer: Any) -> None:
        rate = max(float(group.get("lr", 0)) for group in optimizer.param_groups)
        steps, at_zero, highest = self.steps.get(optimizer, (0, 0, rate))
        highest = max(highest, rate)
        self.steps[optimizer] = [steps + 1, at_zero + 1 if rate < ZERO * highest else 0, highest]

    def findings(self) -> Findings:
        for optimizer, (steps, at_zero, highest) in self.steps.items():
            scheduler = self.schedulers.get(optimizer)
            if scheduler is not None and at_zero >= max(MIN_STEPS, MIN_SHARE * steps):
                yield RULE.finding(
                    f"the last {at_zero:.0f} of {steps:.0f} steps had a rate below a millionth of "
                    f"{highest:g}: "
                    f"{type(scheduler).__name__} ended long before the training",
                    self.program.line_of(scheduler),
                    "give the schedule the number of steps that happen",
                )


RULE = rule(RateAtZero, "FL075", __doc__)
