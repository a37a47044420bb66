"""Gradients are clipped too late or too early.

What:
    `clip_grad_norm_` or `clip_grad_value_` comes after `optimizer.step()`, or before `loss.backward()`.
Why it matters:
    Clipping changes `.grad` in place. After the step, nothing reads `.grad` any more. Before the backward
    pass, it is empty. The gradients stay unclipped, and the protection from exploding gradients has no
    effect.
How to fix it:
    Clip between `backward()` and `step()`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
  +     torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
  -     torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # <-
"""

from collections import Counter
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Clip, Findings, Invariant, rule
from flatout.diagnose.observed_program import parameters_of

MIN_TIMES = 4


class ClipInTheWrongPlace(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.used: set[int] = (
            set()
        )  # parameters whose gradients a step has used, since the latest backward pass
        self.clipped: set[int] = set()  # parameters clipped since then, in time
        self.late: list[Clip] = []  # since then
        self.early: list[Clip] = []  # with no gradients, since the latest step
        self.times: Counter[tuple[Line | None, str]] = Counter()

    def gradients_clipped(self, clip: Clip) -> None:
        if not clip.parameters:
            return
        ids = {id(p) for p in clip.parameters if has_gradient(p)}
        self.early = [other for other in self.early if not ids & {id(p) for p in other.parameters}]
        if not ids:
            self.early.append(clip)
        elif not ids <= self.used:
            self.times[clip.line, "in time"] += 1
            self.clipped |= ids
        elif clip.changed and not ids & self.clipped:
            self.late.append(clip)

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        for clip in self.late:
            if not any(has_gradient(p) for p in clip.parameters):
                self.times[clip.line, "late"] += 1
        self.late = []
        self.used.clear()
        self.clipped.clear()

    def step_begins(self, optimizer: Any) -> None:
        held = {id(p) for p in parameters_of(optimizer) if has_gradient(p)}
        for clip in self.early:
            if held & {id(p) for p in clip.parameters}:
                self.times[clip.line, "early"] += 1
        self.early = []
        self.late = [clip for clip in self.late if not held & {id(p) for p in clip.parameters}]
        self.used |= held

    def findings(self) -> Findings:
        for (line, when), times in self.times.items():
            if when == "in time" or times < MIN_TIMES or self.times.get((line, "in time")):
                continue
            late = "after the step had used them, and then cleared"
            why = late if when == "late" else "before the backward pass computed them"
            yield RULE.finding(
                f"{times} times the gradients were clipped {why}: clipping had no effect",
                line,
                "clip between backward() and step()",
            )


def has_gradient(parameter: Any) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


RULE = rule(ClipInTheWrongPlace, "FL007", __doc__)
