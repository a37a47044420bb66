"""The backward pass runs inside autocast.

What:
    `loss.backward()` is inside the `with torch.autocast(...)` block of the forward pass.
Why it matters:
    Backward operations use the types of their forward operations automatically. Inside the block, other
    operations of the backward pass are cast a second time: custom autograd functions, hooks and gradient
    penalties. The PyTorch documentation advises against it.
How to fix it:
    End the block after the loss. Keep the forward pass and the loss inside, and `backward()` and `step()`
    outside.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.randn(8, 4)).square().mean()
  -         loss.backward()  # <-
  +     loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html ("Backward passes under autocast are not recommended")
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity

MIN_TIMES = 2


class BackwardUnderAutocast(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, int] = {}

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if losses and self.program.torch.is_autocast_enabled(losses[0].device.type):
            self.lines[line_here()] = self.lines.get(line_here(), 0) + 1

    def findings(self) -> Findings:
        for line, times in self.lines.items():
            if times >= MIN_TIMES:
                yield RULE.finding(
                    f"{times} backward passes ran inside an autocast block",
                    line,
                    "loss.backward()  # outside the block",
                )


RULE = rule(BackwardUnderAutocast, "FL309", __doc__, Severity.FRAGILE)
