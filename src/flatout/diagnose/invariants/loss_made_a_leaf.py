"""The loss is cut off from the model and set to require a gradient.

What:
    `backward()` is called on a newly created tensor: `torch.tensor(loss, requires_grad=True)`,
    `Variable(loss.data, requires_grad=True)`, `loss.detach().requires_grad_()`, or
    `loss.requires_grad = True`.
Why it matters:
    This only silences "element 0 of tensors does not require grad". The gradient ends at the new tensor, and
    no parameter gets a gradient. The optimizer changes nothing (or only applies weight decay).
How to fix it:
    Find where the loss left the graph: `.item()`, `.detach()`, `.data`, NumPy, `argmax`, or `torch.no_grad()`
    around the forward pass.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
  -     with torch.no_grad():
  -         loss = model(torch.randn(8, 4)).square().mean()
  -     loss.requires_grad_()
  -     loss.backward()  # <-
  +     loss = model(torch.randn(8, 4)).square().mean()
  +     loss.backward()
        optimizer.step()
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_TIMES = 4


class LossMadeALeaf(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.passes: dict[Line | None, list[int]] = {}  # of leaves, and all

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        passes = self.passes.setdefault(line_here(), [0, 0])
        passes[1] += 1
        parameter = self.program.torch.nn.Parameter
        passes[0] += all(
            loss.is_leaf and loss.requires_grad and loss.numel() == 1 and not isinstance(loss, parameter)
            for loss in losses
        )

    def findings(self) -> Findings:
        for line, (leaves, passes) in self.passes.items():
            if leaves >= MIN_TIMES and leaves == passes and self.program.steps:
                yield RULE.finding(
                    f"the loss of {leaves} backward passes was a new tensor without a graph: no "
                    "parameter got a gradient",
                    line,
                    "call backward() on the loss itself, without item(), detach() or data before it",
                )


RULE = rule(LossMadeALeaf, "FL019", __doc__)
