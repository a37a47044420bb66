"""Scaled gradients are clipped.

What:
    With a GradScaler, `clip_grad_norm_` runs before `scaler.unscale_(optimizer)`, or without it.
Why it matters:
    The scaler multiplies the loss by 65,536 or more. A norm limit of 1 then cuts every gradient to almost
    zero once it is unscaled. Training slows down or stalls, without an error.
How to fix it:
    Call `scaler.unscale_(optimizer)` directly before the clipping. `scaler.step` detects this and does not
    unscale again.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()
  -     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-
  +     scaler.unscale_(optimizer)
  +     torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
Sources:
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.gradient_windows import WindowInvariant
from flatout.diagnose.invariant import Clip, Findings, rule
from flatout.diagnose.observed_program import parameters_of

MIN_TIMES = 4
TINY = 0.01  # a norm of the clipped and then unscaled gradients that nobody wants


class ClipWithoutUnscale(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.scale = 1.0  # of the latest backward pass
        self.unscaled: set[int] = set()  # parameters, since then
        self.clips: list[tuple[Clip, float, float]] = []  # of scaled gradients since then; norm, scale
        self.lines: dict[Line | None, tuple[int, float, float]] = {}  # times, norm after clipping, scale

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        super().backward_begins(losses)
        self.scale = self.windows.scale_of(losses)
        self.clips = []

    def gradients_unscaled(self, scaler: Any, optimizer: Any) -> None:
        self.unscaled |= {id(p) for p in parameters_of(optimizer)}

    def gradients_clipped(self, clip: Clip) -> None:
        if self.scale <= 1 or self.unscaled & {id(p) for p in clip.parameters} or not clip.changed:
            return
        if 0 < (norm := clip.norm) < TINY * self.scale:
            self.clips.append((clip, norm, self.scale))

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        super().scaler_stepped(scaler, optimizer)
        held = {id(p) for p in parameters_of(optimizer)}
        for clip, norm, scale in self.clips:
            if held & {id(p) for p in clip.parameters}:
                times = self.lines.get(clip.line, (0, 0.0, 0.0))[0]
                self.lines[clip.line] = times + 1, norm, scale
        self.clips = []
        self.unscaled -= held

    def findings(self) -> Findings:
        for line, (times, norm, scale) in self.lines.items():
            if times >= MIN_TIMES:
                yield RULE.finding(
                    f"{times} times gradients were clipped to a norm of {norm:.3g} while they were "
                    "multiplied by the scaler's "
                    f"{scale:,.0f}: unscaled, the norm is {norm / scale:.1e}",
                    line,
                    "scaler.unscale_(optimizer)  # before this line",
                )


RULE = rule(ClipWithoutUnscale, "FL008", __doc__)
