"""A frozen parameter still moves.

What:
    A parameter was trained, then frozen with `requires_grad = False`. The optimizer still holds it, with
    a gradient of zeros or an old one, and changes it in every step.
Why it matters:
    Momentum, the averages of Adam and weight decay act on every parameter whose gradient is not None.
How to fix it:
    Set its gradient to None as it is frozen (`zero_grad()` does), or make an optimizer without it.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for i, x in enumerate(torch.randn(20, 8, 4)):
        if i == 5:
            model[0].requires_grad_(False)
  -     optimizer.zero_grad(set_to_none=False)
  +     optimizer.zero_grad()
        model(x).square().mean().backward()
  -     optimizer.step()  # <-
  +     optimizer.step()
"""

from typing import Any

from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, rule

MIN_STEPS = 5


class FrozenPartMoves(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.trained: set[int] = set()  # parameters that required a gradient in a step
        self.last: dict[int, Any] = {}  # a frozen parameter -> sample of its gradient in the latest step
        self.moves: dict[int, list[Any]] = {}  # -> itself, how often, line

    def stepped(self, optimizer: Any, window: Window) -> None:
        for i, parameter in enumerate(self.windows.state(optimizer).parameters):
            key = id(parameter)
            if parameter.requires_grad:
                self.trained.add(key)
                self.last.pop(key, None)
            elif key in self.trained and parameter.grad is not None:
                gradient, weights = window.gradients[i], self.windows.samples([parameter])[0]
                stale = not bool(gradient.any()) or self.program.torch.equal(
                    gradient, self.last.get(key, weights)
                )
                if stale and not self.program.torch.equal(weights, window.weights[i]):
                    entry = self.moves.setdefault(key, [parameter, 0, window.line])
                    entry[1] += 1
                self.last[key] = gradient

    def findings(self) -> Findings:
        moved = [entry for entry in self.moves.values() if entry[1] >= MIN_STEPS]
        if moved:
            yield RULE.finding(
                f"{len(moved)} frozen parameters moved in {moved[0][1]} steps of the optimizer, "
                "although nothing computes their "
                f"gradients: {self.program.names([entry[0] for entry in moved])}",
                moved[0][2],
                "set their gradients to None, or leave them out of the optimizer",
            )


RULE = rule(FrozenPartMoves, "FL077", __doc__)
