"""The optimizer steps before the gradients are computed.

What:
    In a training step, `zero_grad()` is followed by `step()`, and `backward()` comes last.
Why it matters:
    The optimizer step uses cleared gradients. The gradients that `backward()` computes afterwards are cleared
    again before the next step. The model learns nothing.
How to fix it:
    Use the order `zero_grad`, forward, `backward`, `step`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
  +     loss.backward()
  +     optimizer.step()
  -     optimizer.step()  # <-
  -     loss.backward()
"""

from flatout.agent.frames import Line
from flatout.diagnose.gradient_windows import Window
from flatout.diagnose.invariant import rule
from flatout.diagnose.invariants.zero_grad_before_step import StepsWithoutGradients
from flatout.schema.findings import Finding


class StepBeforeBackward(StepsWithoutGradients):
    module_between = True

    def line(self, window: Window) -> Line | None:
        return window.line

    def finding(self, emptied: int, steps: int, line: Line | None) -> Finding:
        return RULE.finding(
            f"in {emptied} of {steps} steps the optimizer found no gradients: it steps after zero_grad, "
            "before the backward "
            "pass of the batch",
            line,
            "optimizer.step()  # after the backward pass",
        )


RULE = rule(StepBeforeBackward, "FL006", __doc__)
