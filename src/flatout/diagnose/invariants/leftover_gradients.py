"""Gradients of an incomplete window enter the next epoch.

What:
    Gradients accumulate, and the optimizer steps if `(i + 1) % n == 0`. The index starts again in every epoch. The
    last batches of an epoch that do not fill a window cause no step, and nothing clears their gradients.
Why it matters:
    The first step of the next epoch adds the gradients of the left batches to those of a whole window. It has up to
    `2 n - 1` batches, each divided by `n`, and some of their gradients belong to older weights.
How to fix it:
    Step after the last batch, too: `if (i + 1) % n == 0 or i + 1 == len(loader)`.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = DataLoader(TensorDataset(torch.randn(80, 4)), batch_size=8)
    for epoch in range(4):
        for i, (x,) in enumerate(batches):
            loss = model(x).square().mean() / 4
            loss.backward()
  -         if (i + 1) % 4 == 0:
  -             optimizer.step()  # <-
  +         if (i + 1) % 4 == 0 or i + 1 == len(batches):
  +             optimizer.step()
                optimizer.zero_grad()
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_WINDOWS = 2  # over the end of an epoch


class LeftoverGradients(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.window = 0  # backward passes since the last step
        self.left = 0  # of these, before the end of the last pass
        self.whole: Counter[int] = Counter()  # backward passes of each window within a pass
        self.spanning: Counter[tuple[int, int]] = Counter()  # left and all backward passes of the others
        self.line: Line | None = None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if self.left and self.window == self.left:
            held = [p for o in self.program.optimizers for g in o.param_groups for p in g["params"]]
            if all(p.grad is None or not bool(p.grad.any()) for p in held):  # cleared by hand
                self.window = self.left = 0

    def backward_ends(self) -> None:
        self.window += 1

    def pass_ends(self, loader: Any) -> None:
        if loader in self.program.training_loaders:
            self.left = self.window

    def gradients_cleared(self, parameters: Iterable[Any]) -> None:
        self.window = self.left = 0

    def step_ends(self, optimizer: Any) -> None:
        if len(self.program.optimizers) > 1:
            return
        if self.left and self.window > self.left:
            self.spanning[self.left, self.window] += 1
            self.line = line_here()
        elif not self.left and self.window:
            self.whole[self.window] += 1
        self.window = self.left = 0

    def findings(self) -> Findings:
        if len(self.whole) != 1 or self.spanning.total() < MIN_WINDOWS:
            return
        ((usual, _),), ((left, passes), times) = self.whole.items(), self.spanning.most_common(1)[0]
        if usual > 1 and passes > usual:
            yield RULE.finding(
                f"{times} steps summed {passes} backward passes, all others {usual}: the last {left} batches of an epoch fill no "
                "window, and their gradients enter the next epoch",
                self.line,
                "step after the last batch, too: if (i + 1) % n == 0 or i + 1 == len(loader)",
            )


RULE = rule(LeftoverGradients, "FL042", __doc__)
