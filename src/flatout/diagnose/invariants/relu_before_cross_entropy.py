"""Logits are the output of a ReLU.

What:
    A cross entropy, or a binary cross entropy with logits, gets what a ReLU returned.
Why it matters:
    No logit is below 0, so no class can be ruled out, and a binary probability is 0.5 or more. A logit of 0 gets no
    gradient: a sample whose class has this logit teaches the model nothing about it.
How to fix it:
    Pass the output of the last linear layer to the loss, without an activation.
Example:
    import torch

  - model = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.ReLU())
  + model = torch.nn.Linear(4, 10)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
  -     loss = criterion(model(x), torch.zeros(8, dtype=torch.long))  # <-
  +     loss = criterion(model(x), torch.zeros(8, dtype=torch.long))
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule

SAME_VALUES = ("Clone", "Permute", "Squeeze", "ToCopy", "Transpose", "Unsafe", "Unsqueeze", "View")  # nodes
MIN_CALLS = 2


class ReluBeforeCrossEntropy(Invariant):
    calls = frozenset({"binary_cross_entropy_with_logits", "cross_entropy", "nll_loss"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[tuple[Line | None, str], int] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        node, of_logits = argument(args, kwargs, 0, "input").grad_fn, name != "nll_loss"
        while node is not None and node.name() != "ReluBackward0":
            if not of_logits and node.name().startswith("LogSoftmax"):
                of_logits = True
            elif not node.name().startswith(SAME_VALUES):
                return
            node = node.next_functions[0][0]
        if node is not None and of_logits:
            self.lines[line_here(), name] = self.lines.get((line_here(), name), 0) + 1

    def findings(self) -> Findings:
        for (line, name), calls in self.lines.items():
            if calls >= MIN_CALLS:
                yield RULE.finding(
                    f"in {calls} calls {name} got the output of a ReLU: no logit is below 0",
                    line,
                    "pass the output of the last layer, without the ReLU",
                )


RULE = rule(ReluBeforeCrossEntropy, "FL083", __doc__)
