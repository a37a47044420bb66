"""The steps are out of proportion to the weights.

What:
    In almost every step, the optimizer changes a whole weight by more than a tenth of its size, and the
    loss has risen.
Why it matters:
    Steps of about a thousandth of the weights are usual. With far larger ones, training jumps around without
    learning.
How to fix it:
    Lower the learning rate until steps are about a thousandth of the weights, and check the scale of the
    loss.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
  - optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
  + optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for x in torch.randn(60, 16, 8):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x[:, :4]).backward()
  -     optimizer.step()  # <-
  +     optimizer.step()
"""

from statistics import median
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.diagnose.observed_program import parameters_of

WARM_UP = 10
MIN_STEPS = 40  # after it
MAX_STEPS = 500
MIN_ELEMENTS, MAX_ELEMENTS = 64, 1 << 22
MAX_WEIGHTS = 4
HIGH = 0.1
MIN_SHARE = 0.9
WORSE = 2.0  # the loss, times its first value


class UpdateSizes(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.losses: list[float] = []
        self.weights: list[Any] = []  # some of one optimizer, with their values before the step
        self.ratios: list[float] = []  # the largest of each step
        self.line: Line | None = None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if len(losses) == 1 and losses[0].numel() == 1 and len(self.losses) < MAX_STEPS:
            self.losses.append(float(losses[0].detach()))

    def step_begins(self, optimizer: Any) -> None:
        self.line = line_here()
        sizes = range(MIN_ELEMENTS, MAX_ELEMENTS)
        large = [
            p for p in parameters_of(optimizer) if p.ndim > 1 and p.numel() in sizes and p.grad is not None
        ]
        if len(self.ratios) < MAX_STEPS:
            self.weights = [(p, p.detach().clone()) for p in large[:: -(-len(large) // MAX_WEIGHTS) or 1]]

    def step_ends(self, optimizer: Any) -> None:
        if self.weights:
            pairs = [((p.detach() - before).norm(), before.norm()) for p, before in self.weights]
            self.ratios.append(max(float(change / size.clamp(min=1e-12)) for change, size in pairs))
        self.weights = []

    def findings(self) -> Findings:
        ratios, losses = self.ratios[WARM_UP:], self.losses
        if len(ratios) < MIN_STEPS or len(self.program.optimizers) > 1 or len(losses) < MIN_STEPS:
            return
        high, start, end = sum(r > HIGH for r in ratios), losses[0], median(losses[-MIN_STEPS // 2 :])
        if high >= MIN_SHARE * len(ratios) and start > 0 and end > WORSE * start:
            yield RULE.finding(
                f"{high} of {len(ratios)} steps changed a whole weight by about {median(ratios):.2g} of "
                "its size, and "
                f"the loss rose from {start:.3g} to {end:.3g}; steps of 1e-3 are usual",
                self.line,
                "a lower learning rate",
            )


RULE = rule(UpdateSizes, "FL074", __doc__)
