"""A loss that expects logits receives probabilities.

What:
    Rows of probabilities go into `cross_entropy` (or `CrossEntropyLoss`), or the output of a sigmoid into a loss
    "with logits".
Why it matters:
    These losses apply the softmax or the sigmoid themselves. Applied twice, the largest probability that 10
    classes can reach is 0.23 instead of 1. The loss cannot fall below 1.46, and gradients are small
    everywhere. The model trains slowly and ends with a worse result.
How to fix it:
    Pass the output of the last linear layer to the loss. Apply the softmax only where you need probabilities.
Example:
    import torch

  - model = torch.nn.Sequential(torch.nn.Linear(4, 10), torch.nn.Softmax(dim=1))
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
from flatout.diagnose.invariant import Findings, argument, line_here, rule
from flatout.diagnose.value_sources import SHAPES, ValueSources, on_simplex

OF_CLASSES = "cross_entropy"
WITH_LOGITS = frozenset({"binary_cross_entropy_with_logits", "multilabel_soft_margin_loss"})
MIN_CALLS = 2


class SoftmaxBeforeCrossEntropy(ValueSources):
    made_by = frozenset({"softmax", "sigmoid"})
    calls = made_by | SHAPES | WITH_LOGITS | {OF_CLASSES}

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, list[Any]] = {}  # -> function, values and calls

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        super().called(name, args, kwargs, result)
        if (name in WITH_LOGITS or name == OF_CLASSES) and result.requires_grad:
            scores = argument(args, kwargs, 0, "input")
            source = self.sources.get(scores)
            if name == OF_CLASSES and source != "softmax":
                source = "row of probabilities" if on_simplex(scores) else None
            if source is not None:
                self.lines.setdefault(line_here(), [name, source, 0])[2] += 1

    def findings(self) -> Findings:
        for line, (name, source, calls) in self.lines.items():
            if calls >= MIN_CALLS:
                twice = "softmax" if name == OF_CLASSES else "sigmoid"
                what = (
                    "rows of probabilities, each with the sum 1"
                    if " " in source
                    else f"the output of a {source}"
                )
                yield RULE.finding(
                    f"in {calls} calls {name} got {what}: it applies the {twice} itself",
                    line,
                    f"pass the logits, without the {twice} before them",
                )


RULE = rule(SoftmaxBeforeCrossEntropy, "FL017", __doc__)
