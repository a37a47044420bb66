"""A softmax lacks its dimension.

What:
    `F.softmax(x)`, `F.log_softmax(x)`, `torch.nn.Softmax()` or `torch.nn.LogSoftmax()` is called without
    `dim`.
Why it matters:
    PyTorch then chooses by the number of dimensions: 0 for one or three, 1 for two and four. If the input
    gains a dimension, the probabilities run over another axis, without an error. PyTorch warns, and plans to
    remove the implicit choice.
How to fix it:
    Set `dim=1` for class scores of a batch, or `dim=-1` for the last dimension.
Example:
    import torch
    import torch.nn.functional as F

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
  -     probabilities = F.softmax(model(x))  # <-
  +     probabilities = F.softmax(model(x), dim=1)
        optimizer.zero_grad()
        probabilities.square().mean().backward()
        optimizer.step()
Sources:
    torch/nn/functional.py, _get_softmax_dim
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, argument, rule
from flatout.diagnose.running_modules import direct_line
from flatout.schema.findings import Severity


class SoftmaxWithoutDim(Invariant):
    calls = frozenset({"log_softmax", "softmax", "softmin"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[
            Line, tuple[str, int, int]
        ] = {}  # -> function, dimensions, and the one that PyTorch chose

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if argument(args, kwargs, 1, "dim") is None and (line := direct_line()) is not None:
            self.lines[line] = name, result.ndim, 0 if result.ndim in (0, 1, 3) else 1

    def findings(self) -> Findings:
        for line, (name, dimensions, chosen) in self.lines.items():
            yield RULE.finding(
                f"{name} has no `dim`: PyTorch chose {chosen}, since the input has {dimensions} dimensions",
                line,
                f"dim={chosen}",
            )


RULE = rule(SoftmaxWithoutDim, "FL314", __doc__, Severity.FRAGILE)
