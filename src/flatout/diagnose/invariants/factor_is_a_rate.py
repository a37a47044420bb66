"""A LambdaLR returns the learning rate instead of a factor.

What:
    The function given to `LambdaLR` returns the optimizer's own rate, and never more. `LambdaLR` multiplies the
    optimizer's rate with what the function returns.
Why it matters:
    The rate enters twice: 0.02 becomes 0.0004. Training is slower by that factor, and looks like a bad rate.
How to fix it:
    Return a factor that begins at 1, or make the optimizer with `lr=1.0`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
  - schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.02 * 0.99**step)  # <-
  + schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    for x in torch.randn(12, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.optim.lr_scheduler.LambdaLR.html
"""

import math
from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule

MIN_STEPS = 5


class FactorIsARate(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.factors: WeakKeyDictionary[Any, list[float]] = WeakKeyDictionary()

    def scheduler_stepped(self, scheduler: Any) -> None:
        if type(scheduler).__name__ == "LambdaLR" and float(scheduler.base_lrs[0]):
            factor = float(scheduler.optimizer.param_groups[0]["lr"]) / float(scheduler.base_lrs[0])
            self.factors.setdefault(scheduler, []).append(factor)

    def findings(self) -> Findings:
        for scheduler, factors in self.factors.items():
            rate = float(scheduler.base_lrs[0])
            first = float(scheduler.lr_lambdas[0](0))
            if (
                len(factors) >= MIN_STEPS
                and rate < 1
                and math.isclose(first, rate, rel_tol=1e-6)
                and max(factors) <= rate
            ):
                yield RULE.finding(
                    f"the function returns {first:g}, the optimizer's rate itself, and at most that: LambdaLR multiplies both, so the "
                    f"rate is {first * rate:g}",
                    self.program.line_of(scheduler),
                    "return a factor that begins at 1",
                )


RULE = rule(FactorIsARate, "FL095", __doc__)
