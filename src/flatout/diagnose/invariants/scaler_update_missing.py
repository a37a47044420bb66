"""The scaler is never updated.

What:
    `scaler.step(optimizer)` runs in the training loop, but `scaler.update()` never runs.
Why it matters:
    `update` lowers the factor after an overflow and raises it again later. Without it, an enabled scaler
    raises "step() has already been called since the last update()" in the second step. A disabled scaler (no
    GPU, or float32 by option) raises nothing, so the error appears only on the first run on a GPU.
How to fix it:
    Call `scaler.update()` directly after `scaler.step(optimizer)`, once per step, even with several
    optimizers.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()
  -     scaler.step(optimizer)  # <-
  +     scaler.step(optimizer)
  +     scaler.update()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

from typing import Any

from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity

MIN_STEPS = 10
MAX_SCALERS = 16


class ScalerUpdateMissing(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.steps: dict[Any, list[Any]] = {}  # scaler -> steps, updates, line

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        if scaler in self.steps or len(self.steps) < MAX_SCALERS:
            steps = self.steps.setdefault(scaler, [0, 0, None])
            steps[0], steps[2] = steps[0] + 1, line_here()

    def scaler_updated(self, scaler: Any) -> None:
        if scaler in self.steps:
            self.steps[scaler][1] += 1

    def findings(self) -> Findings:
        for steps, updates, line in self.steps.values():
            if steps >= MIN_STEPS and not updates:
                yield RULE.finding(
                    f"the scaler has stepped {steps} times and was never updated: on a device where it "
                    "is enabled, the second "
                    "step raises an error",
                    line,
                    "scaler.update()  # after this line",
                )


RULE = rule(ScalerUpdateMissing, "FL301", __doc__, Severity.FRAGILE)
