"""A loss from DataParallel is a scalar only on one GPU.

What:
    The module wrapped in `DataParallel` returns its loss, and `backward()` is called on it directly.
Why it matters:
    DataParallel stacks the losses of its devices: with two GPUs, the loss has two entries.
    `backward()` then raises "grad can be implicitly created only for scalar outputs". On one GPU, the program
    works.
How to fix it:
    Call `loss.mean().backward()`.
Example:
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 1)

        def forward(self, x, y):
            return torch.nn.functional.mse_loss(self.fc(x), y)

    model = torch.nn.DataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4), torch.randn(8, 1))
  -     loss.backward()  # <-
  +     loss.mean().backward()
        optimizer.step()
"""

from typing import Any

from flatout.agent.frames import Line
from flatout.diagnose.invariant import Findings, Invariant, line_here, rule
from flatout.schema.findings import Severity


class DataParallelLoss(Invariant):
    def __init__(self, program: Any) -> None:
        super().__init__(program)
        self.outputs: set[int] = set()  # graphs of scalars that DataParallel returned in this step
        self.line: Line | None = None

    def forward_ends(self, module: Any, output: Any) -> None:
        if isinstance(module, self.program.torch.nn.DataParallel) and getattr(output, "ndim", 1) == 0:
            self.outputs.add(id(output.grad_fn))

    def backward_begins(self, losses: tuple[Any, ...]) -> None:
        if any(id(loss.grad_fn) in self.outputs for loss in losses):
            self.line = line_here()

    def backward_ends(self) -> None:
        self.outputs.clear()

    def findings(self) -> Findings:
        if self.line is not None:
            yield RULE.finding(
                "the loss comes from DataParallel: on several GPUs it has one entry for each, and backward() fails",
                self.line,
                "loss.mean().backward()",
            )


RULE = rule(DataParallelLoss, "FL307", __doc__, Severity.FRAGILE)
