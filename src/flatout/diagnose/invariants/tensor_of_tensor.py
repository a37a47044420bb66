"""torch.tensor is called on a tensor.

What:
    `torch.tensor(x)` receives a value that is already a tensor.
Why it matters:
    It copies the values and detaches them from their graph. No gradient flows through the copy. PyTorch warns
    once.
How to fix it:
    Use `x.detach().clone()` for a copy, or `x` itself to keep the gradient.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
  -     y = torch.tensor(x)  # <-
  +     y = x.detach().clone()
        optimizer.zero_grad()
        model(y).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.tensor.html
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.diagnose.running_modules import direct_line
from flatout.schema.findings import Severity


class TensorOfTensor(Invariant):
    calls = frozenset({"tensor"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line, list[int]] = {}  # -> calls, and those that cut off a graph

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if args and isinstance(args[0], self.program.torch.Tensor) and (line := direct_line()) is not None:
            counts = self.lines.setdefault(line, [0, 0])
            counts[0] += 1
            counts[1] += args[0].requires_grad

    def findings(self) -> Findings:
        for line, (calls, cut) in self.lines.items():
            graphs = f", {cut} of them with a gradient that is cut off" if cut else ""
            yield RULE.finding(
                f"the argument was already a tensor in {calls} calls{graphs}: this copies and detaches it",
                line,
                "x.detach().clone()",
            )


RULE = rule(TensorOfTensor, "FL311", __doc__, Severity.FRAGILE)
