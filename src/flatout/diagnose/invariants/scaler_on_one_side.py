"""The scaler is used for the loss or the step, but not for both.

What:
    `scaler.scale(loss).backward()` is followed by `optimizer.step()` instead of `scaler.step(optimizer)`. Or
    `scaler.step(optimizer)` follows a plain `loss.backward()`.
Why it matters:
    In the first case, the optimizer uses gradients that are tens of thousands of times too large, including
    infinities. In the second case, `scaler.step` divides gradients that were never multiplied. They become
    about 65,536 times too small.
How to fix it:
    Use all three of `scaler.scale(loss).backward()`, `scaler.step(optimizer)` and `scaler.update()`, or none.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()
  -     optimizer.step()  # <-
  +     scaler.step(optimizer)
  +     scaler.update()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, rule

MIN_STEPS = 4
MIN_SHARE = 0.8


class ScalerOnOneSide(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.latest: tuple[Any, Window] | None = None  # optimizer and window of the latest step
        self.unscaled: set[Any] = set()  # optimizers, by id
        # steps; of scaled gradients without the scaler, line, scale; of others with it, line, scale
        self.steps: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()

    def gradients_unscaled(self, scaler: Any, optimizer: Any) -> None:
        self.unscaled.add(id(optimizer))

    def stepped(self, optimizer: Any, window: Window) -> None:
        self._judge()
        self.latest = optimizer, window
        self.steps.setdefault(optimizer, [0, 0, None, 0.0, 0, None, 0.0])[0] += 1

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        super().scaler_stepped(scaler, optimizer)
        self.unscaled.discard(id(optimizer))
        if self.latest is not None and self.latest[0] is optimizer:
            window, self.latest = self.latest[1], None
            scale = scaler.get_scale() if scaler.is_enabled() else 1.0
            if scale > 1 and window.passes and all(p.scale == 1 for p in window.passes):
                steps = self.steps[optimizer]
                steps[4:] = steps[4] + 1, window.line, scale

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        super().backward_begins(losses)
        self._judge()

    def _judge(self) -> None:
        """The latest step did not come from a scaler."""
        if self.latest is None:
            return
        (optimizer, window), self.latest = self.latest, None
        scales = [p.scale for p in window.passes]
        if id(optimizer) not in self.unscaled and window.unchanged and min(scales) > 1:
            steps = self.steps[optimizer]
            steps[1:4] = steps[1] + 1, window.line, scales[-1]
        self.unscaled.discard(id(optimizer))

    def findings(self) -> Findings:
        for steps, plain, plain_line, factor, divided, divided_line, scale in self.steps.values():
            if plain >= MIN_STEPS and plain >= MIN_SHARE * (steps - 1):
                yield RULE.finding(
                    f"{plain} of {steps} steps used gradients that were still multiplied by the "
                    f"scaler's {factor:,.0f}",
                    plain_line,
                    "scaler.step(optimizer)",
                )
            elif divided >= MIN_STEPS and divided >= MIN_SHARE * steps:
                yield RULE.finding(
                    f"in {divided} of {steps} steps the scaler divided gradients by {scale:,.0f}, but "
                    "no loss was multiplied",
                    divided_line,
                    "scaler.scale(loss).backward()",
                )


RULE = rule(ScalerOnOneSide, "FL009", __doc__)
