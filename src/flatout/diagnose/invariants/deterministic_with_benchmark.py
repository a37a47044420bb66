"""cuDNN is set to deterministic and benchmark at the same time.

What:
    `torch.backends.cudnn.deterministic = True` and `torch.backends.cudnn.benchmark = True` are both set when a step ends.
Why it matters:
    `benchmark` times the algorithms of cuDNN and uses the fastest. The fastest one can change from run to
    run, and different algorithms round differently. The run is then not repeatable, which is the purpose of
    `deterministic`. At the same time, `deterministic` excludes the fastest algorithms.
How to fix it:
    For a repeatable run, set `deterministic = True` and `benchmark = False`. For a fast run, set only
    `benchmark = True`.
Example:
    import torch

    torch.backends.cudnn.deterministic = True
  - torch.backends.cudnn.benchmark = True
  + torch.backends.cudnn.benchmark = False
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in torch.randn(3, 8, 4):
        optimizer.zero_grad()
        model(x).square().mean().backward()
  -     optimizer.step()  # <-
  +     optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/notes/randomness.html#cuda-convolution-benchmarking
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity


class DeterministicWithBenchmark(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.line: Line | None = None

    def step_ends(self, optimizer: Any) -> None:
        cudnn = self.program.torch.backends.cudnn
        if self.line is None and cudnn.deterministic and cudnn.benchmark:
            self.line = line_here()

    def findings(self) -> Findings:
        if self.line is not None:
            yield RULE.finding(
                "cudnn.deterministic and cudnn.benchmark are both on in training: the run is not repeatable, nor the fastest",
                self.line,
                "torch.backends.cudnn.benchmark = False",
            )


RULE = rule(DeterministicWithBenchmark, "FL310", __doc__, Severity.FRAGILE)
