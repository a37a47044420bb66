"""The micro-batch that steps leaves out the exchange of gradients.

What:
    Gradients accumulate over several micro-batches, and `no_sync()` leaves out the exchange between devices for
    some of them. The last one before the optimizer steps is among them.
Why it matters:
    The gradients are averaged between devices only in a backward pass outside `no_sync()`. If the last
    micro-batch is inside it, each device steps with its own gradients, and the copies of the model drift apart.
How to fix it:
    Use one condition for both: compute `last = (i + 1) % n == 0` once, enter `no_sync()` if it is false, and step
    if it is true.
Example:
    import contextlib
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, x in enumerate(torch.randn(20, 8, 4)):
  -     with model.no_sync() if i % 4 != 0 else contextlib.nullcontext():
  -         loss = model(x).square().mean() / 4  # <-
  +     with model.no_sync() if (i + 1) % 4 != 0 else contextlib.nullcontext():
  +         loss = model(x).square().mean() / 4
            loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule

MIN_STEPS = 2


class NoSyncOnTheStep(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.forward: tuple[Any, bool, Line | None] | None = (
            None  # module, whether it exchanges gradients, line
        )
        self.window: list[bool] = []  # of the backward passes since the last step
        self.model: Any = None
        self.lines: dict[Line | None, tuple[int, int]] = {}  # -> steps, backward passes of the last one
        self.line: Line | None = None

    def forward_begins(self, module: Any, inputs: tuple[Any, ...]) -> None:
        # it decides in the forward pass
        exchanges = getattr(module, "require_backward_grad_sync", None)
        if exchanges is not None and self.program.torch.is_grad_enabled():
            self.forward = module, bool(exchanges), line_here()

    def backward_ends(self) -> None:
        if self.forward is not None:
            (model, exchanges, self.line), self.forward = self.forward, None
            self.window = [*self.window, exchanges] if model is self.model else [exchanges]
            self.model = model

    def step_ends(self, optimizer: Any) -> None:
        window, self.window = self.window, []
        if len(self.program.optimizers) == 1 and window and any(window) and not window[-1]:
            self.lines[self.line] = self.lines.get(self.line, (0, 0))[0] + 1, len(window)

    def findings(self) -> Findings:
        for line, (steps, passes) in self.lines.items():
            if steps >= MIN_STEPS:
                yield RULE.finding(
                    f"in {steps} steps, the last of {passes} backward passes ran under no_sync(), after others had exchanged "
                    "their gradients: each rank steps with gradients of its own",
                    line,
                    "enter no_sync() for all but the last backward pass before a step",
                )


RULE = rule(NoSyncOnTheStep, "FL037", __doc__)
