"""A layer with parameters is created in forward.

What:
    `forward` creates a layer (`torch.nn.Linear(...)(x)`) or a `torch.nn.Parameter` of a module.
Why it matters:
    Every step creates a new layer with new random weights, on the CPU. The optimizer does not know it, so it
    is never trained.
How to fix it:
    Create it in `__init__` and use it in `forward`.
Example:
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 8)
  +         self.second = torch.nn.Linear(8, 1)

        def forward(self, x):
  -         return torch.nn.Linear(8, 1)(self.first(x))  # <-
  +         return self.second(self.first(x))

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(12, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_STEPS = 4
MAX_KEPT = 32


class LayersMadeInForward(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.made: list[tuple[Any, Line | None, str]] = []  # parameters, until the next backward pass
        self.steps: dict[Line | None, set[int]] = {}  # in which parameters of a line got a gradient
        self.values: dict[Line | None, set[float]] = {}  # their sums: constant ones may be filters
        self.names: dict[Line | None, str] = {}

    def parameter_made(self, module: Any, name: str, parameter: Any) -> None:
        inside = self.program.forward_depth and self.program.torch.is_grad_enabled()
        if inside and parameter.requires_grad and len(self.made) < MAX_KEPT:
            self.made.append((parameter, line_here(), type(module).__name__))

    def backward_ends(self) -> None:
        held = self.program.optimized() if self.made else ()
        for parameter, line, name in self.made:
            if parameter.grad is not None and id(parameter) not in held:
                self.steps.setdefault(line, set()).add(self.program.steps)
                self.values.setdefault(line, set()).add(float(parameter.detach().float().sum()))
                self.names[line] = name
        self.made = []

    def findings(self) -> Findings:
        for line, steps in self.steps.items():
            if len(steps) >= MIN_STEPS and len(self.values[line]) >= MIN_STEPS:
                yield RULE.finding(
                    f"in {len(steps)} steps forward made a new {self.names[line]} with random "
                    "parameters: they got gradients, and no "
                    "optimizer ever held them",
                    line,
                    "make the layer in __init__",
                )


RULE = rule(LayersMadeInForward, "FL022", __doc__)
