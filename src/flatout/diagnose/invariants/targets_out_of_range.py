"""A loss gets targets that it does not define.

What:
    A binary cross entropy gets targets far outside 0 and 1. A ranking, embedding or margin loss gets others than -1 and
    1. A CTC loss gets the number of its blank as a label. A KL divergence gets negative target probabilities.
Why it matters:
    These functions check nothing. The loss has no minimum, or counts such samples as 0.
How to fix it:
    Convert the labels: `y.clamp(min=0)` makes 0 and 1 of -1 and 1, `2 * y - 1` the reverse. For CTC number the classes
    from 1. For a KL divergence of log-probabilities set `log_target=True`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    criterion = torch.nn.BCEWithLogitsLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(9, 8, 4):
        y = x[:, :1].sign()
        optimizer.zero_grad()
  -     criterion(model(x), y).backward()  # <-
  +     criterion(model(x), y.clamp(min=0)).backward()
        optimizer.step()
Sources:
    torch/nn/functional.py
"""

from collections.abc import Callable, Mapping
from typing import Any

from flatout.agent.frames import Line, place_of
from flatout.diagnose.invariant import Findings, Invariant, argument, line_here, rule
from flatout.diagnose.running_modules import has_values

MAX_CALLS = 40  # whose targets are read
SLACK = 0.5  # labels for one side may be a little beyond, on purpose


def _beyond(y: Any) -> bool:
    return bool((y < -SLACK).any() or (y > 1 + SLACK).any())


def _not_signs(y: Any) -> bool:
    return bool((y.abs() != 1).any())


Test = tuple[
    int, str, Callable[[Any], bool], str
]  # position and name of the target, what is wrong, what is expected
BINARY: Test = (1, "target", _beyond, "0 and 1")
TESTS: dict[str, Test] = {
    "binary_cross_entropy": BINARY,
    "binary_cross_entropy_with_logits": BINARY,
    "multilabel_soft_margin_loss": BINARY,
    "cosine_embedding_loss": (2, "target", _not_signs, "-1 and 1"),
    "hinge_embedding_loss": (1, "target", _not_signs, "-1 and 1"),
    "margin_ranking_loss": (2, "target", _not_signs, "-1 and 1"),
    "soft_margin_loss": (1, "target", _not_signs, "-1 and 1"),
    "kl_div": (1, "target", lambda y: bool((y < -1e-3).any()), "probabilities"),
}


class TargetsOutOfRange(Invariant):
    calls = frozenset({*TESTS, "ctc_loss"})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.read: dict[Line | None, int] = {}
        self.lines: dict[Line | None, tuple[str, str]] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        line = line_here()
        self.read[line] = self.read.get(line, 0) + 1
        if self.read[line] > MAX_CALLS or kwargs.get("log_target"):
            return
        if name == "ctc_loss":
            blank = argument(args, kwargs, 4, "blank", 0)
            y, lengths = args[1], args[3]
            if y.ndim == 2 and len(lengths) == len(y):
                used = y.new_tensor(range(y.shape[1])) < self.program.torch.as_tensor(lengths)[:, None].to(
                    y.device
                )
                y = y[used]
            if bool((y == blank).any()):
                self.lines[line] = name, f"the number of its blank, {blank}, among the labels"
            return
        position, word, wrong, expected = TESTS[name]
        y = argument(args, kwargs, position, word)
        if y is not None and y.numel() and has_values(y) and wrong(y.detach()):
            self.lines[line] = name, f"targets from {y.min():.3g} to {y.max():.3g}, and expects {expected}"

    def findings(self) -> Findings:
        for line, (name, what) in self.lines.items():
            yield RULE.finding(f"{name} gets {what}", place_of(line), "convert the labels")


RULE = rule(TargetsOutOfRange, "FL085", __doc__)
