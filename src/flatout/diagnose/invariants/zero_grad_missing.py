"""Gradients are never cleared.

What:
    The optimizer steps again and again, and each backward pass adds to gradients that earlier steps have
    used. They are cleared never, or only outside of the loop that steps.
Why it matters:
    `backward()` adds to `.grad`. Each step then follows the sum of all gradients since they were cleared.
    The longer the run, the larger and more outdated the step. The loss can still fall for a while, so the
    error goes unnoticed.
How to fix it:
    Call `optimizer.zero_grad()` once in every training step, before its first `backward()` or after `step()`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        x = torch.randn(8, 4)
  +     optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
  -     optimizer.step()  # <-
  +     optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, rule

MIN_STEPS = 5
MIN_SHARE = 0.6  # a loop may step twice for each zero_grad


class ZeroGradMissing(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # all, piled, line, cleared at

    def stepped(self, optimizer: Any, window: Window) -> None:
        steps = self.steps.setdefault(optimizer, [0, 0, None, None, []])
        steps[0] += 1
        if window.piled:
            steps[1:3], steps[4] = (steps[1] + 1, window.line), window.piled
        steps[3] = window.cleared or steps[3]

    def findings(self) -> Findings:
        for steps, piled, line, cleared, parameters in self.steps.values():
            if piled < MIN_STEPS or piled < MIN_SHARE * (steps - 1):
                continue
            what = "cleared only outside of the loop that steps" if cleared else "never cleared"
            yield RULE.finding(
                f"in {piled} of {steps} steps the gradients still held those of earlier steps: they are "
                f"{what} "
                f"({self.program.names(parameters)})",
                cleared or line,
                "optimizer.zero_grad()  # in every step, before the backward pass",
            )


RULE = rule(ZeroGradMissing, "FL001", __doc__)
