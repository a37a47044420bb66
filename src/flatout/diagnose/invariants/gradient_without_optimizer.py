"""Parameters receive gradients, but no optimizer holds them.

What:
    A module with its own new parameters runs in training, outside of the model: a loss with weights to learn, a second
    head, a projection. Each step computes their gradients, and no optimizer has these parameters.
Why it matters:
    They keep their initial values. Nothing says so, because the gradients are there.
How to fix it:
    Give them to the optimizer: `[*model.parameters(), *loss.parameters()]`. Or freeze them: `requires_grad_(False)`.
Example:
    import torch

    model, scale = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
  - optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # <-
  + optimizer = torch.optim.SGD([*model.parameters(), *scale.parameters()], lr=0.1)
    for x in torch.randn(24, 8, 4):
        optimizer.zero_grad()
        scale(model(x)).square().mean().backward()
        optimizer.step()
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from flatout.diagnose.invariant import Findings, Invariant, rule

MIN_STEPS = 20


class GradientWithoutOptimizer(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: Counter[int] = Counter()  # with a gradient, of each parameter
        self.loaded: WeakSet[Any] = WeakSet()  # modules with values from elsewhere
        self.evaluated: WeakSet[Any] = WeakSet()
        self.stepped: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # module -> the line of the optimizer

    def state_loaded(self, module: Any, state: Mapping[str, Any], strict: bool, result: Any) -> None:
        self.loaded.update(module.modules())

    def mode_set(self, module: Any, training: bool) -> None:
        if not training and not self.program.evaluated:
            self.evaluated.add(module)

    def step_begins(self, optimizer: Any) -> None:
        for root in self.program.roots:
            if root.training:
                with_gradient = [id(p) for p in root.parameters() if p.requires_grad and p.grad is not None]
                self.steps.update(with_gradient)
                if with_gradient:
                    self.stepped[root] = self.program.line_of(optimizer)

    def findings(self) -> Findings:
        optimizers, optimized = self.program.optimizers, self.program.optimized()
        for root in self.program.roots:
            parameters = [p for p in root.parameters() if p.requires_grad]
            unheld = parameters and not any(id(p) in optimized for p in parameters)
            copied = any(p._version > MIN_STEPS for p in parameters)  # the program changes them itself
            elsewhere = root in self.loaded or root in self.evaluated
            if not unheld or copied or elsewhere or not optimizers:
                continue
            if min(self.steps[id(p)] for p in parameters) >= MIN_STEPS:
                yield RULE.finding(
                    f"the {len(parameters)} parameters of {type(root).__name__} received a gradient in each of {MIN_STEPS} "
                    f"steps or more, but no optimizer holds them: {self.program.names(parameters)} never change",
                    self.stepped.get(root),
                    "give them to the optimizer, or freeze them with requires_grad_(False)",
                )


RULE = rule(GradientWithoutOptimizer, "FL094", __doc__)
