"""The scheduler steps before the optimizer.

What:
    `scheduler.step()` comes before `optimizer.step()`, so the optimizer never steps at the first rate.
Why it matters:
    The first value of the schedule is skipped, and every later value comes one pass too early. Warm-up starts
    at its second value, and a drop after 30 epochs comes after 29. PyTorch warns once, among other lines, and
    continues.
How to fix it:
    Call `scheduler.step()` after the optimizer steps, at the end of the same pass.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for epoch in range(5):
  -     scheduler.step()  # <-
        for x in torch.randn(4, 8, 4):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
  +     scheduler.step()
Sources:
    https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
    (the order changed in torch 1.1)
"""

from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_TIMES = 3


class SchedulerBeforeOptimizer(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.stepped: WeakSet[Any] = WeakSet()  # optimizers, also those whose step a scaler has skipped
        self.trained: WeakSet[Any] = (
            WeakSet()
        )  # optimizers that stepped since the latest step of their scheduler
        # a scheduler whose first step came too early -> its line, how often it stepped there with steps of the
        # optimizer in between, the first rate
        self.early: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self.known: WeakSet[Any] = WeakSet()

    def step_ends(self, optimizer: Any) -> None:
        self.stepped.add(optimizer)
        self.trained.add(optimizer)

    def scaler_stepped(self, scaler: Any, optimizer: Any) -> None:
        self.step_ends(optimizer)

    def scheduler_stepped(self, scheduler: Any) -> None:
        optimizer, line = getattr(scheduler, "optimizer", None), line_here()
        if optimizer is None:
            return
        trained = optimizer in self.trained
        if scheduler not in self.known:
            self.known.add(scheduler)
            if optimizer not in self.stepped and getattr(scheduler, "last_epoch", 0) == 1:
                self.early[scheduler] = [line, 1, first_rate(scheduler)]
        elif (early := self.early.get(scheduler)) is not None:
            early[1] = early[1] + 1 if trained and early[0] == line else -(1 << 30)
        self.trained.discard(optimizer)

    def findings(self) -> Findings:
        for scheduler, (line, times, rate) in self.early.items():
            if times >= MIN_TIMES and rate and scheduler.optimizer in self.stepped:
                yield RULE.finding(
                    f"{type(scheduler).__name__} stepped before the first step of its optimizer, and "
                    f"{times} times in all: no "
                    f"step had the first rate of the schedule, {rate:g}",
                    line,
                    "scheduler.step()  # after the optimizer's steps of the same pass",
                )


def first_rate(scheduler: Any) -> float:
    """The rate before the first step of a scheduler; 0 if it is unknown."""
    rates, factors = getattr(scheduler, "base_lrs", None), getattr(scheduler, "lr_lambdas", None)
    return float(rates[0] * (factors[0](0) if factors else 1)) if rates else 0.0


RULE = rule(SchedulerBeforeOptimizer, "FL011", __doc__)
