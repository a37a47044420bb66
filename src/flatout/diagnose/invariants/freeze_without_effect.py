"""Freezing has no effect.

What:
    `requires_grad = False` is set on a module, such as one of `model.children()`. Or the name of the
    attribute is misspelled (`require_grad`, `requires_gradient`).
Why it matters:
    Python sets a new attribute that is never read. The layers that should stay fixed keep training.
How to fix it:
    Use `module.requires_grad_(False)` for a whole module, and `parameter.requires_grad = False` for one
    parameter.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
  - model[0].requires_grad = False  # <-
  + model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(8, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

import ast
import difflib
import linecache
from typing import Any

from flatout.agent.frames import place_at, user_sources
from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.diagnose.observed_program import parameters_of
from flatout.schema.findings import SourceLocation

MIN_STEPS = 5
MIN_LIKENESS = 0.8


class FreezeWithoutEffect(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: dict[int, int] = {}  # parameter -> steps with a gradient

    def step_begins(self, optimizer: Any) -> None:
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and parameter.requires_grad:
                self.steps[id(parameter)] = self.steps.get(id(parameter), 0) + 1

    def findings(self) -> Findings:
        frozen: dict[str, dict[int, Any]] = {}  # attribute -> parameters that train nevertheless
        for module in (module for root in self.program.roots for module in root.modules()):
            for name in like_freezing(module):
                if not reads(type(module), name):
                    frozen.setdefault(name, {}).update((id(p), p) for p in module.parameters())
            for parameter in module.parameters(recurse=False):
                for name in like_freezing(parameter):
                    frozen.setdefault(name, {})[id(parameter)] = parameter
        for name, parameters in frozen.items():
            trained = [
                p for key, p in parameters.items() if self.steps.get(key, 0) >= MIN_STEPS and p.requires_grad
            ]
            if trained:
                yield RULE.finding(
                    f"`{name}` was set to False where nothing reads it: {len(trained)} parameters still "
                    "train "
                    f"({self.program.names(trained)})",
                    assignment(
                        name, {line[0].co_filename for p in trained if (line := self.program.line_of(p))}
                    ),
                    "module.requires_grad_(False)",
                )


def like_freezing(owner: Any) -> list[str]:
    """The attributes of a module or parameter that look like ``requires_grad = False``."""
    own = [name for name, value in vars(owner).items() if value is False and "grad" in name]
    return [n for n in own if difflib.SequenceMatcher(None, n, "requires_grad").ratio() >= MIN_LIKENESS]


def reads(kind: type, name: str) -> bool:
    """Whether a class has an attribute of this name of its own."""
    own = [
        value
        for each in kind.__mro__
        if not each.__module__.startswith("torch.")
        for value in vars(each).items()
    ]
    codes = [getattr(getattr(value, "fget", value), "__code__", None) for _, value in own]
    return any(key == name for key, _ in own) or any(
        code is not None and name in code.co_names for code in codes
    )


def assignment(name: str, files: set[str]) -> SourceLocation | None:
    """The place that assigns False to an attribute; correctly spelled, not in a loop over parameters."""
    for file in sorted(user_sources() | files):
        tree = ast.parse("".join(linecache.getlines(file)))
        loops = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.For) and "parameters(" in ast.unparse(node.iter)
        ]
        right = {node for loop in loops for node in ast.walk(loop)} if name == "requires_grad" else set()
        assigned = (n for n in ast.walk(tree) if isinstance(n, ast.Assign) and n not in right)
        for node in assigned:
            owners = [
                target for target in node.targets if isinstance(target, ast.Attribute) and target.attr == name
            ]
            if owners and getattr(node.value, "value", None) is False:
                return place_at(file, node.lineno)
    return None


RULE = rule(FreezeWithoutEffect, "FL034", __doc__)
