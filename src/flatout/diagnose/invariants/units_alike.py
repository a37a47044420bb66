"""All units of a layer are identical.

What:
    Every unit of a hidden layer began with the same weights, and after 20 steps or more they are still the same, bit
    for bit. Their gradients are the same, too, and the next layer reads all of them alike.
Why it matters:
    Identical units compute one and the same value, and no step makes them differ. The layer has the capacity of a
    single unit, however wide it is.
How to fix it:
    Initialise weights at random: keep PyTorch's defaults, or use a function such as `torch.nn.init.kaiming_uniform_`.
    Constants are for biases and for the weights of normalisation.
Example:
    import torch

    hidden = torch.nn.Linear(4, 8)
  - torch.nn.init.constant_(hidden.weight, 0.1)  # <-
  + torch.nn.init.kaiming_uniform_(hidden.weight)
    torch.nn.init.zeros_(hidden.bias)
    output = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(output.weight, 0.1)
    optimizer = torch.optim.SGD([*hidden.parameters(), *output.parameters()], lr=0.01)
    for x in torch.randn(30, 8, 4):
        optimizer.zero_grad()
        output(hidden(x).tanh()).sub(1).square().mean().backward()
        optimizer.step()
Sources:
    Goodfellow, Bengio and Courville, Deep Learning, section 8.4
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.diagnose.observed_program import parameters_of
from flatout.diagnose.running_modules import has_values

LOOKS = frozenset({20, 50, 100, 200})  # steps of an optimizer


class UnitsAlike(Invariant):
    calls = frozenset({"constant_", "fill_", "zero_"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self.lines = program.tensor_map()  # parameter -> the line that filled it
        self.first = program.tensor_map()  # parameters whose units are alike -> the first unit
        self.found: dict[Line | None, dict[str, tuple[int, int]]] = {}  # -> parameter -> units, steps

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        filled = args[0] if args else kwargs.get("tensor")
        if isinstance(filled, self.program.torch.nn.Parameter):
            self.lines[filled] = line_here()

    def step_begins(self, optimizer: Any) -> None:
        steps = self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if steps == 1:
            self.first.update({p: p.detach()[0].clone() for p in parameters_of(optimizer) if self.alike(p)})
        elif steps in LOOKS and self.first:
            for p in list(parameters_of(optimizer)):
                moved = p in self.first and not self.program.torch.equal(p[0], self.first[p])
                if not moved or p.grad is None or not self.alike(p) or not self.alike(p.grad):
                    continue
                readers = (q for q in parameters_of(optimizer) if q is not p and reads(q, p))
                if p.grad.any() and any(self.alike(by_unit(q, p)) for q in readers):
                    line = self.lines.get(p) or self.program.line_of(p)
                    self.found.setdefault(line, {})[self.program.name_of(p)] = len(p), steps

    def alike(self, p: Any) -> bool:
        """Whether the units of a weight are the same. A unit: what gives one feature or one channel."""
        torch = self.program.torch
        if p.ndim < 2 or len(p) < 2 or not p[0].numel() or p.layout is not torch.strided or not has_values(p):
            return False
        return torch.equal(p[0], p[1]) and bool((p == p[:1]).all())

    def findings(self) -> Findings:
        for line, found in self.found.items():
            steps = max(steps for _, steps in found.values())
            layers = ", ".join(f"{name} ({units})" for name, (units, _) in found.items())
            yield RULE.finding(
                f"after {steps} steps, all units of a layer are identical, and so are their gradients: {layers}",
                line,
                "initialise weights at random",
            )


def reads(weight: Any, units: Any) -> bool:
    """Whether the inputs of a weight may be the outputs of these units."""
    return bool(weight.ndim > 1 and weight.shape[1] and weight.shape[1] % len(units) == 0)


def by_unit(weight: Any, units: Any) -> Any:
    """The part of a weight for each unit that it reads."""
    return weight.detach().reshape(len(weight), len(units), -1).transpose(0, 1)


RULE = rule(UnitsAlike, "FL081", __doc__)
