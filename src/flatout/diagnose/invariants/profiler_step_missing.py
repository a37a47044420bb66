"""A profiler with a schedule never gets step() calls.

What:
    `torch.profiler.profile(schedule=...)` is used, but `prof.step()` is never called, or only after the loop.
Why it matters:
    The schedule counts calls of `step()`. Without them, the profiler stays in its first phase. With `wait=1`,
    it records nothing and writes no trace. Without a wait phase, it records the whole run as one step and
    fills the memory.
How to fix it:
    Call `prof.step()` at the end of every pass of the loop.
Example:
    import torch
    from torch.profiler import profile, schedule

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(schedule=schedule(wait=1, warmup=1, active=3)) as prof:  # <-
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
  +         prof.step()
Sources:
    https://docs.pytorch.org/docs/stable/profiler.html
"""

from collections.abc import Mapping
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

STOP = "torch.profiler.profile.stop"
MIN_STEPS = 3


class ProfilerStepMissing(Invariant):
    calls = frozenset({"torch.profiler.profile.start", STOP})

    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.started: dict[int, tuple[Line | None, int]] = {}  # profiler -> line, and optimizer steps so far
        self.found: dict[Line | None, int] = {}

    def called(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        profiler = args[0]
        if name != STOP:
            self.started[id(profiler)] = line_here(), self.program.steps
            return
        line, steps = self.started.pop(id(profiler), (None, self.program.steps))
        scheduled = getattr(profiler.schedule, "__name__", "") != "_default_schedule_fn"
        if scheduled and profiler.step_num == 0 and self.program.steps - steps >= MIN_STEPS:
            self.found[line] = self.program.steps - steps

    def findings(self) -> Findings:
        for line, steps in self.found.items():
            yield RULE.finding(
                f"this profiler has a schedule, but step() was not called in {steps} training steps: it stays in its first phase",
                line,
                "prof.step()  # at the end of every pass of the loop",
            )


RULE = rule(ProfilerStepMissing, "FL025", __doc__)
