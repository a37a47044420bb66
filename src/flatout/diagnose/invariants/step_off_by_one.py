"""The first optimizer step comes too early: the condition is off by one.

What:
    Gradients accumulate over `n` batches. The condition of the step holds in a pass other than the
    `n`-th, for example `i % n == 0` with an `i` that starts at 0.
Why it matters:
    The first step has the gradients of one batch, although each loss is divided by `n`. In every epoch,
    the last batches are left over, and they become part of the next epoch or are lost.
How to fix it:
    Step if `(i + 1) % n == 0`, and after the last batch of the epoch.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(40):
        loss = model(torch.randn(8, 4)).square().mean() / 4
        loss.backward()
  -     if i % 4 == 0:
  -         optimizer.step()  # <-
  +     if (i + 1) % 4 == 0:
  +         optimizer.step()
            optimizer.zero_grad()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, rule

STEPS = 5  # the first ones


class StepOffByOne(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.divided: list[float] = []  # what the losses since the latest step are divided by
        self.first: WeakKeyDictionary[Any, list[Any]] = (
            WeakKeyDictionary()
        )  # the divisors of each window, and its line

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        super().backward_begins(losses)
        self.divided.append(divisor(self.windows.graph_of(losses[0])))
        del self.divided[:-64]

    def stepped(self, optimizer: Any, window: Window) -> None:
        divided, self.divided = self.divided, []
        first = self.first.setdefault(optimizer, [])
        if len(first) < STEPS:
            first.append((divided if len(divided) == len(window.passes) else [0.0], window.line))

    def findings(self) -> Findings:
        for first in self.first.values():
            (start, line), *others = first
            size, known = start[0] if start else 0.0, [d for divisors, _ in first for d in divisors]
            if len(first) < STEPS or size < 2 or set(known) != {size} or len(start) not in (1, size - 1):
                continue
            if len(start) < size and all(len(divisors) == size for divisors, _ in others):
                yield RULE.finding(
                    f"each loss is divided by {size:.0f}, and the steps have the gradients of "
                    f"{size:.0f} batches, but the first "
                    f"one of {len(start)}: the condition of the step is off by one",
                    line,
                    f"if (i + 1) % {size:.0f} == 0:",
                )


def divisor(node: Any) -> float:
    """The number by which the last operation of a loss divides it; 0 if it does not divide."""
    other, name = getattr(node, "_saved_other", None), type(node).__name__
    if not name.startswith(("Div", "Mul")) or other is None or getattr(other, "ndim", False):
        return 0.0
    factor = float(other)
    return round(factor if name.startswith("Div") else 1 / factor, 6) if factor else 0.0


RULE = rule(StepOffByOne, "FL040", __doc__)
