"""A loss receives values that are not log-probabilities.

What:
    `nll_loss` (or `NLLLoss`) receives the output of a linear layer or of a softmax, not of `log_softmax`. Or the
    first argument of `kl_div` is a probability.
Why it matters:
    The loss only picks the entry of the target class and negates it. With logits, it can fall without limit,
    because the model learns to output ever larger numbers. With probabilities, its gradient vanishes exactly
    where the model is most wrong.
How to fix it:
    Apply `F.log_softmax(output, dim=1)` first, or use `cross_entropy` instead.
Example:
    import torch
    import torch.nn.functional as F

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
  -     loss = F.nll_loss(model(x), torch.zeros(8, dtype=torch.long))  # <-
  +     loss = F.nll_loss(F.log_softmax(model(x), dim=1), torch.zeros(8, dtype=torch.long))
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.NLLLoss.html
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, argument, line_here, rule
from flatout.diagnose.running_modules import has_values
from flatout.diagnose.value_sources import SHAPES, ValueSources, on_simplex

PROBABILITIES = frozenset({"softmax", "sigmoid"})
MIN_CALLS = 2


class NllLossWithoutLog(ValueSources):
    made_by = PROBABILITIES | {"conv1d", "conv2d", "linear", "relu", "tanh"}
    calls = made_by | SHAPES | {"kl_div", "nll_loss"}

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.lines: dict[Line | None, list[Any]] = {}  # -> function, source and calls

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        super().called(name, args, kwargs, result)
        if name in ("nll_loss", "kl_div") and result.requires_grad:
            scores = argument(args, kwargs, 0, "input")
            source = self.sources.get(scores) or ("softmax" if on_simplex(scores) else None)
            wrong = source in PROBABILITIES or (source is not None and name == "nll_loss")
            if wrong and has_values(scores) and bool((scores > 0).any()):
                self.lines.setdefault(line_here(), [name, source, 0])[2] += 1

    def findings(self) -> Findings:
        for line, (name, source, calls) in self.lines.items():
            if calls >= MIN_CALLS:
                yield RULE.finding(
                    f"in {calls} calls {name} got the output of `{source}`, with values above 0: these are no log-probabilities",
                    line,
                    "log_softmax instead of softmax"
                    if source == "softmax"
                    else "apply log_softmax first, or use cross_entropy",
                )


RULE = rule(NllLossWithoutLog, "FL018", __doc__)
