"""Every step creates a new optimizer.

What:
    The optimizer is made again and again for the same parameters, in the loop over batches or over short
    epochs.
Why it matters:
    The optimizer holds the momentum, the averages of Adam and its bias correction. A new optimizer starts
    without them. Every step of Adam is then a first step (the sign of the gradient, at the full learning
    rate), and a scheduler has no effect.
How to fix it:
    Create it once, before the loop.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  + optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
  -     optimizer = torch.optim.Adam(model.parameters())  # <-
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.gains import MIN_REPEATS, calls_at_busiest_line, event_of
from flatout.diagnose.gradient_windows import Window, WindowInvariant
from flatout.diagnose.invariant import Findings, line_here, rule
from flatout.schema.profile import ProfileRecord

MIN_MADE = 6  # in a row
MAX_STEPS = 20  # of each


class OptimizerMadeEveryStep(WindowInvariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        # line -> the latest optimizer made there, its steps, the weights after them, how many it continues
        self.latest: dict[Line | None, list[Any]] = {}
        self.found: dict[Line | None, tuple[int, int, str]] = {}

    def optimizer_made(self, optimizer: Any) -> None:
        super().optimizer_made(optimizer)
        line, parameters = line_here(), self.windows.state(optimizer).parameters
        before, steps, weights, made = self.latest.get(line, (None, 0, None, 0))
        if before is not None and 0 < steps <= MAX_STEPS and has_state(before):
            same = [id(p) for p in parameters] == [id(p) for p in self.windows.state(before).parameters]
            alike = repr(before.defaults) == repr(optimizer.defaults)
            continues = same and alike and bool((weights == self.windows.samples(parameters)).all())
            made = made + 1 if continues else 0
            if made >= MIN_MADE:
                self.found[line] = made, steps, type(optimizer).__name__
        else:
            made = 0
        self.latest[line] = [optimizer, 0, None, made]

    def optimizer_loaded(self, optimizer: Any, state: Any) -> None:
        for entry in self.latest.values():
            if entry[0] is optimizer:
                entry[3] = 0  # it goes on with a state

    def stepped(self, optimizer: Any, window: Window) -> None:
        for entry in self.latest.values():
            if entry[0] is optimizer:
                entry[1:3] = entry[1] + 1, self.windows.samples(self.windows.state(optimizer).parameters)

    def findings(self) -> Findings:
        for line, (made, steps, name) in self.found.items():
            yield RULE.finding(
                f"{made} times a new {name} for the same weights replaced one that had made {steps} "
                "steps: momentum and "
                "averages start at zero each time",
                line,
                "make the optimizer once, before the loop",
            )


def has_state(optimizer: Any) -> bool:
    return any(hasattr(value, "shape") for state in optimizer.state.values() for value in state.values())


def check_profile(profile: ProfileRecord) -> Findings:
    _, _, places = event_of(profile, "make_optimizer")
    made = calls_at_busiest_line(profile, "make_optimizer")
    if places and made >= MIN_REPEATS:
        yield RULE.profile_finding(f"this line has created {made} optimizers", places[:1])


RULE = rule(OptimizerMadeEveryStep, "FL027", __doc__, check_profile=check_profile)
