"""Every label of a batch is ignored.

What:
    All labels that a cross entropy gets have the value of `ignore_index`.
Why it matters:
    Its mean is over no elements: the loss is NaN. Skipped or replaced by 0, the batch teaches nothing.
How to fix it:
    Keep the labelled part when sequences are cut, and leave out samples without a label.
Example:
    import torch
    import torch.nn.functional as F

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(4, 8, 4):
  -     labels = torch.full((8,), -100)
  +     labels = torch.randint(0, 3, (8,))
  -     loss = torch.nan_to_num(F.cross_entropy(model(x), labels))  # <-
  +     loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

from collections.abc import Mapping
from typing import Any

from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule


class LabelsAllIgnored(Invariant):
    calls = frozenset({"cross_entropy", "nll_loss"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Any, list[int]] = {}  # line -> calls with no label left, and all calls

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        labels = argument(args, kwargs, 1, "target")
        if not labels.is_floating_point() and self.program.torch.is_grad_enabled():
            ignored = argument(args, kwargs, 4, "ignore_index", -100)
            counts = self.lines.setdefault(line_here(), [0, 0])
            counts[0] += bool((labels == ignored).all())
            counts[1] += 1

    def findings(self) -> Findings:
        for line, (empty, calls) in self.lines.items():
            if empty:
                yield RULE.finding(
                    f"in {empty} of {calls} calls every label is ignored (ignore_index): the mean of no losses is NaN",
                    line,
                    "keep labels in every batch",
                )


RULE = rule(LabelsAllIgnored, "FL065", __doc__)
