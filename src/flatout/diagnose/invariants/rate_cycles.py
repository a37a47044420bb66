"""The learning rate goes up and down within an epoch.

What:
    A cosine schedule steps after every batch, but its `T_max` counts epochs: the rate falls to its minimum and rises
    again several times in one pass over the data.
Why it matters:
    Most of the training runs at other rates than intended, and it ends at a random point of the cycle.
How to fix it:
    Give `T_max` the total number of steps, or step once per epoch.
Example:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Linear(4, 1)
    loader = DataLoader(TensorDataset(torch.randn(200, 4)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)  # <-
  + schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6 * len(loader))
    for (x,) in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        schedule.step()
"""

from typing import Any
from weakref import WeakKeyDictionary

from flatout.diagnose.invariant import Findings, Invariant, rule

MIN_CYCLES = 2  # from the maximum down and up again
CYCLIC = ("CyclicLR", "CosineAnnealingWarmRestarts", "LambdaLR", "MultiplicativeLR", "ReduceLROnPlateau")


class RateCycles(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.rates: WeakKeyDictionary[Any, list[float]] = WeakKeyDictionary()  # of the present pass
        self.turns: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()

    def pass_begins(self, loader: Any) -> None:
        if loader in self.program.training_loaders:
            self.rates.clear()

    def scheduler_stepped(self, scheduler: Any) -> None:
        if type(scheduler).__name__ in CYCLIC:
            return
        rates = self.rates.setdefault(scheduler, [])
        rates.append(float(scheduler.optimizer.param_groups[0]["lr"]))
        turns = sum(a > b < c for a, b, c in zip(rates, rates[1:], rates[2:], strict=False))
        if turns >= MIN_CYCLES and self.program.training_loaders:
            self.turns[scheduler] = turns, len(rates)

    def findings(self) -> Findings:
        for scheduler, (turns, steps) in self.turns.items():
            period = getattr(scheduler, "T_max", None)
            yield RULE.finding(
                f"the rate went up and down {turns} times in {steps} steps of one epoch: {type(scheduler).__name__} steps after "
                f"every batch" + (f", but T_max={period} counts epochs" if period else ""),
                self.program.line_of(scheduler),
                "T_max = epochs * len(loader), the total number of steps",
            )


RULE = rule(RateCycles, "FL071", __doc__)
