"""Gradients are cleared inside the accumulation window.

What:
    The optimizer steps once per several batches, but the gradients are cleared for every batch.
Why it matters:
    When the optimizer steps, only the gradients of the last batch of the window are left. The work of all
    other batches is lost, and the effective batch size is not the intended one.
How to fix it:
    Clear the gradients where the optimizer steps, directly after `step()`. Under
    `accelerator.accumulate`, use `optimizer.zero_grad()` of the prepared optimizer: it waits like its
    `step()`. `model.zero_grad()` does not.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(40):
  -     optimizer.zero_grad()  # <-
        loss = model(torch.randn(8, 4)).square().mean() / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
  +         optimizer.zero_grad()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.gradient_windows import Pass, Window, WindowInvariant
from flatout.diagnose.invariant import Findings, rule

MIN_STEPS = 4
MIN_SHARE = 0.8


class ZeroGradInWindow(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: WeakKeyDictionary[Any, list[Any]] = (
            WeakKeyDictionary()
        )  # all, with lost passes, lost, line

    def stepped(self, optimizer: Any, window: Window) -> None:
        steps = self.steps.setdefault(optimizer, [0, 0, 0, None])
        steps[0] += 1
        *earlier, last = list[Any](window.passes) or [None]
        # only batches of one loop: one line, one optimizer, no weights moved and no input trained in between
        if not earlier or not window.scaled_copy or any(not comparable(p, window) for p in window.passes):
            return
        following = window.passes[1:]
        if all(lost(one, other) for one, other in zip(earlier, following, strict=True)):
            steps[1:] = steps[1] + 1, steps[2] + len(earlier), window.cleared or last.line

    def findings(self) -> Findings:
        for steps, losing, passes, line in self.steps.values():
            if losing >= MIN_STEPS and losing >= MIN_SHARE * steps:
                yield RULE.finding(
                    f"{losing} of {steps} steps used only their last backward pass: {passes} others "
                    "were computed since the "
                    "steps before, and cleared",
                    line,
                    "optimizer.zero_grad()  # directly after the step",
                )


def comparable(one: Pass, window: Window) -> bool:
    same_weights = bool((one.weights == window.weights).all())
    return one.line == window.passes[-1].line and one.alone and not one.input_learns and same_weights


def lost(one: Pass, following: Pass) -> bool:
    """Whether all gradients of a pass were cleared before the next one."""
    return bool(one.after.any()) and not bool(following.before.any())


RULE = rule(ZeroGradInWindow, "FL004", __doc__)
