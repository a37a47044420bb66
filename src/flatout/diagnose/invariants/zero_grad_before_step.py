"""Gradients are cleared between backward and step.

What:
    `zero_grad()` comes after `loss.backward()` and before `optimizer.step()`.
Why it matters:
    The step finds no gradients (`None`, or zeros), and the model learns nothing from this batch. With
    momentum or weight decay, the parameters still change, so it looks like training.
How to fix it:
    Use the order `zero_grad`, forward, `backward`, `step`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
  +     optimizer.step()
  +     optimizer.zero_grad()
  -     optimizer.zero_grad()  # <-
  -     optimizer.step()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, rule
from flatout.schema.findings import Finding

MIN_STEPS = 4
MIN_SHARE = 0.9


class StepsWithoutGradients(WindowInvariant):
    """Counts steps that find no gradients, though backward passes computed some."""

    module_between = False  # whether a module runs between zero_grad and the step

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()  # with passes, emptied, line

    def stepped(self, optimizer: Any, window: Window) -> None:
        if not window.passes:
            return
        steps = self.steps.setdefault(optimizer, [0, 0, None])
        steps[0] += 1
        if window.emptied and (window.cleared is not None and window.ran) is self.module_between:
            steps[1], steps[2] = steps[1] + 1, self.line(window)

    def line(self, window: Window) -> Line | None:
        return window.cleared or window.line

    def findings(self) -> Findings:
        for steps, emptied, line in self.steps.values():
            if emptied >= MIN_STEPS and emptied >= MIN_SHARE * steps:
                yield self.finding(emptied, steps, line)

    def finding(self, emptied: int, steps: int, line: Line | None) -> Finding:
        return RULE.finding(
            f"in {emptied} of {steps} steps the optimizer found no gradients: they were cleared after "
            "the backward pass",
            line,
            "optimizer.zero_grad()  # before the forward pass, or after the step",
        )


RULE = rule(StepsWithoutGradients, "FL003", __doc__)
