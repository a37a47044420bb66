"""model.parameters() is stored and used twice.

What:
    A name is set to `model.parameters()` (or a `filter` or generator over it), and given to clipping in
    every step.
Why it matters:
    It is a generator: the first use exhausts it. The second use finds no parameters and raises no error.
    Clipping clips nothing.
How to fix it:
    Use `list(model.parameters())`, or call `model.parameters()` in each place.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  - params = model.parameters()
  + params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for _ in range(8):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
  -     torch.nn.utils.clip_grad_norm_(params, 1.0)  # <-
  +     torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
"""

from collections.abc import Iterator
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Clip, Findings, Invariant, rule

MIN_TIMES = 3


class ParametersExhausted(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.empty: dict[Line | None, list[Any]] = {}  # line -> the iterator that it got, and how often

    def gradients_clipped(self, clip: Clip) -> None:
        if not clip.parameters and isinstance(clip.given, Iterator):
            seen = self.empty.setdefault(clip.line, [clip.given, 0])
            seen[1] += seen[0] is clip.given

    def findings(self) -> Findings:
        for line, (_, times) in self.empty.items():
            if times >= MIN_TIMES:
                yield RULE.finding(
                    f"{times} times this call got the same generator, which was exhausted: no gradient "
                    "was clipped",
                    line,
                    "keep list(model.parameters())",
                )


RULE = rule(ParametersExhausted, "FL033", __doc__)
