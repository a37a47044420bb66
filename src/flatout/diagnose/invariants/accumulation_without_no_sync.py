"""Every micro-batch averages the gradients between devices.

What:
    The model is a `DistributedDataParallel`. Several backward passes accumulate
    gradients before a step. `no_sync()` is not used.
Why it matters:
    Every backward pass sends all gradients over the network, but only their sum is needed. With n
    micro-batches, this multiplies the traffic by n.
How to fix it:
    Put `with model.no_sync():` around the forward and backward passes of all micro-batches except the last.
    With an `Accelerator`, this is `with accelerator.no_sync(model):`.
Example:
  + import contextlib
  +
    import torch

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
  -     loss = model(torch.randn(8, 4)).square().mean() / 4
  -     loss.backward()  # <-
  -     if (i + 1) % 4 == 0:
  +     last = (i + 1) % 4 == 0
  +     with contextlib.nullcontext() if last else model.no_sync():
  +         loss = model(torch.randn(8, 4)).square().mean() / 4
  +         loss.backward()
  +     if last:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity

MIN_WINDOWS = 5


class AccumulationWithoutNoSync(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.exchanged = 0  # backward passes since the last step that averaged the gradients
        self.windows: list[int] = []
        self.line: Line | None = None

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        modules = [root for root in self.program.roots if hasattr(root, "require_backward_grad_sync")]
        if modules and all(module.require_backward_grad_sync for module in modules):
            self.exchanged += 1
            self.line = line_here()

    def step_ends(self, optimizer: Any) -> None:
        self.windows.append(self.exchanged)
        self.exchanged = 0

    def findings(self) -> Findings:
        windows = [count for count in self.windows if count]
        if len(windows) >= MIN_WINDOWS and min(windows) > 1 and len(self.program.optimizers) == 1:
            yield RULE.finding(
                f"each of {min(windows)} backward passes of a step averages all gradients over the ranks; one would do",
                self.line,
                "with model.no_sync(): around all backward passes but the last",
            )


RULE = rule(AccumulationWithoutNoSync, "FL116", __doc__, Severity.TIME)
