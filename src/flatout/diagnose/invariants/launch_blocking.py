"""The program waits for every kernel.

What:
    The program sets `CUDA_LAUNCH_BLOCKING=1` in its own environment.
Why it matters:
    The host waits for the device after every kernel. The setting is for finding the line of a device error.
    Left enabled, it makes training of small models several times slower.
How to fix it:
    Remove the line. Set the variable in the shell for a run that needs it.
Example:
    import os

  - os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
  -     optimizer.step()  # <-
  +     optimizer.step()
"""

import os
from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity

VARIABLE = "CUDA_LAUNCH_BLOCKING"


class LaunchBlocking(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.outside = os.environ.get(VARIABLE)  # set by the user for this run
        self.line: Line | None = None

    def step_ends(self, optimizer: Any) -> None:
        if self.line is None and self.outside != "1" and os.environ.get(VARIABLE) == "1":
            self.line = line_here()

    def findings(self) -> Findings:
        if self.line is not None:
            yield RULE.finding(
                f"the program sets {VARIABLE}=1: on a GPU the host waits for each kernel before it launches the next",
                self.line,
                f"remove it; for one run: {VARIABLE}=1 python train.py",
            )


RULE = rule(LaunchBlocking, "FL113", __doc__, Severity.TIME)
