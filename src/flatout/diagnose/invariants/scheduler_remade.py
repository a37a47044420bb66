"""The scheduler is recreated during training.

What:
    The loop creates a learning-rate scheduler repeatedly.
Why it matters:
    Each new scheduler starts at step zero and takes the initial rate again. The schedule is never followed.
How to fix it:
    Create it once, before the loop.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  + scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for epoch in range(8):
  -     scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)  # <-
        for x in torch.randn(4, 8, 4):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        scheduler.step()
"""

from typing import Any
from weakref import WeakSet

from flatout.agent.frames import Line
from flatout.diagnose.gains import MIN_REPEATS, calls_at_busiest_line, event_of
from flatout.diagnose.invariant import Findings, Invariant, rule
from flatout.schema.profile import ProfileRecord

MIN_MADE = 4


class SchedulerRemade(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.known: WeakSet[Any] = WeakSet()
        # line -> the optimizer, schedulers in a row, steps of the latest
        self.latest: dict[Line | None, list[Any]] = {}

    def scheduler_stepped(self, scheduler: Any) -> None:
        line, optimizer = self.program.line_of(scheduler), getattr(scheduler, "optimizer", None)
        latest = self.latest.setdefault(line, [optimizer, 0, 0])
        if scheduler not in self.known:
            self.known.add(scheduler)
            first = getattr(scheduler, "last_epoch", 0) == 1  # no position was given or loaded
            in_a_row = first and latest[0] is optimizer and latest[2] <= 1
            latest[:] = optimizer, latest[1] + 1 if in_a_row else 1, 0
        latest[2] += 1

    def findings(self) -> Findings:
        for line, (_, made, steps) in self.latest.items():
            if made >= MIN_MADE and steps <= 1:
                yield RULE.finding(
                    f"this line has made {made} schedulers for one optimizer, and each stepped only "
                    "once: the schedule "
                    "starts again each time",
                    line,
                    "make the scheduler once, before the loop",
                )


def check_profile(profile: ProfileRecord) -> Findings:
    _, _, places = event_of(profile, "make_scheduler")
    made = calls_at_busiest_line(profile, "make_scheduler")
    if places and made >= MIN_REPEATS:
        yield RULE.profile_finding(f"this line has created {made} schedulers", places[:1])


RULE = rule(SchedulerRemade, "FL053", __doc__, check_profile=check_profile)
