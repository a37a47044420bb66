"""A cross entropy takes another dimension for the classes.

What:
    The output of a linear layer, with its features last, goes into a cross entropy with more than two dimensions. The
    cross entropy expects the classes in dimension 1.
Why it matters:
    If both dimensions have the same size, no error comes: the softmax runs over positions instead of classes.
How to fix it:
    `cross_entropy(scores.transpose(1, 2), labels)`, or flatten both: `scores.flatten(0, 1), labels.flatten()`.
Example:
    import torch
    import torch.nn.functional as F

    model = torch.nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 5, 4):
        labels = torch.randint(0, 5, (8, 5))
  -     loss = F.cross_entropy(model(x), labels)  # <-
  +     loss = F.cross_entropy(model(x).transpose(1, 2), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule

LOSSES = frozenset({"cross_entropy", "nll_loss"})
SAME_LAYOUT = frozenset(
    {
        "relu",
        "log_softmax",
        "dropout",
        "float",
        "to",
        "mul",
        "div",
        "__mul__",
        "__truediv__",
        "add",
        "__add__",
    }
)


class ClassDimension(Invariant):
    calls = LOSSES | SAME_LAYOUT | {"linear"}

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.features_last = program.tensor_map()
        self.lines: dict[Line | None, Any] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        scores = argument(args, kwargs, 0, "input")
        if name == "linear" or (name in SAME_LAYOUT and scores in self.features_last):
            if isinstance(result, self.program.torch.Tensor) and result.ndim > 2:
                self.features_last[result] = True
        elif name in LOSSES and scores.ndim > 2 and scores in self.features_last:
            self.lines[line_here()] = tuple(scores.shape)

    def findings(self) -> Findings:
        for line, shape in self.lines.items():
            yield RULE.finding(
                f"the scores have the shape {shape} with the classes last, as a linear layer returned them; cross_entropy takes "
                f"dimension 1 ({shape[1]}) for the class dimension",
                line,
                "transpose: cross_entropy(scores.transpose(1, -1), labels)",
            )


RULE = rule(ClassDimension, "FL073", __doc__)
