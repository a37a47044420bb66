"""Binary cross entropy of probabilities runs under autocast.

What:
    `binary_cross_entropy` or `BCELoss` is called inside `with torch.autocast(...)`.
Why it matters:
    Its gradient does not fit into half precision. On CUDA, it raises "binary_cross_entropy and BCELoss are
    unsafe to autocast". A program that was only run on a CPU, or with autocast disabled, stops there on its
    first run on a GPU.
How to fix it:
    Pass the logits to `BCEWithLogitsLoss`. It combines the sigmoid and the loss, is safe under autocast, and
    is more accurate without autocast too.
Example:
    import torch

  - model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Sigmoid())
  - criterion = torch.nn.BCELoss()
  + model = torch.nn.Linear(4, 1)
  + criterion = torch.nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
  -         loss = criterion(model(x), torch.zeros(8, 1))  # <-
  +         loss = criterion(model(x), torch.zeros(8, 1))
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html#prefer-binary-cross-entropy-with-logits-over-binary-cross-entropy
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule
from flatout.schema.findings import Severity


class BceUnderAutocast(Invariant):
    calls = frozenset({"binary_cross_entropy"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, int] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        if self.program.torch.is_autocast_enabled(argument(args, kwargs, 0, "input").device.type):
            self.lines[line_here()] = self.lines.get(line_here(), 0) + 1

    def findings(self) -> Findings:
        for line, calls in self.lines.items():
            yield RULE.finding(
                f"binary cross entropy of probabilities was called under autocast (calls: {calls}): on CUDA this raises an error",
                line,
                "binary_cross_entropy_with_logits(logits, target), without a sigmoid before it",
            )


RULE = rule(BceUnderAutocast, "FL308", __doc__, Severity.FRAGILE)
