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

  - model = torch.nn.DataParallel(Net())
  + model = torch.nn.DataParallel(Net())  # flatout: ignore FL115
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4), torch.randn(8, 1))
  -     loss.backward()  # <-
  +     loss.mean().backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.values import ValueOrigin
from flatout.schema.findings import Finding, Severity

WRAPPED = {"torch.nn.DataParallel", "torch.nn.parallel.DataParallel"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.of("backward"):
            origins = program.origins(event.source, event.subject) if event.subject is not None else []
            if origins and all(_gathered(program, origin) for origin in origins):
                name = event.source.code(event.subject) if event.subject is not None else ""
                yield RULE.finding(
                    f"`{name}` has one entry per GPU: backward() works with one GPU and raises an error with two",
                    event.place,
                    f"{name}.mean().backward()",
                    others=[origins[0].source.place(origins[0].node)],
                )


def _gathered(program: ScriptProgram, origin: ValueOrigin) -> bool:
    """Return whether a value is the direct output of a module in DataParallel."""
    call = origin.node
    return (
        isinstance(call, ast.Call)
        and not origin.part
        and any(each.dotted in WRAPPED for each in program.origins(origin.source, call.func))
    )


RULE = Rule("FL307", "data_parallel_loss", Severity.FRAGILE, __doc__, check)
