"""Every step checks whether the loss is finite.

What:
    `if torch.isnan(loss)` (or `isfinite`, `isinf`, `loss != loss`) is in the training loop and runs in every
    step.
Why it matters:
    An `if` needs the result in Python, so the host waits for the device in every step, exactly as with
    `.item()`. (On a CPU it costs nothing.)
How to fix it:
    Check every hundred steps, or let the device decide. A GradScaler skips such steps automatically, and
    `torch.where` needs no result in Python.
Example:
    import torch

    device = torch.device("cuda")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, device=device)).square().mean()
  -     if torch.isnan(loss):  # <-
  +     if step % 100 == 0 and torch.isnan(loss):
            break
        loss.backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.host_sync_every_step import from_step
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

ASKS = {"isnan", "isfinite", "isinf"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    if not program.uses_device:
        return
    for loop in program.steps:
        for event in loop.of("call"):
            call = event.node
            if not isinstance(call, ast.Call) or not loop.always(event):
                continue
            dotted = event.source.dotted(call.func)
            by_function = dotted in {f"torch.{name}" for name in ASKS} and len(call.args) == 1
            by_method = (
                isinstance(call.func, ast.Attribute)
                and call.func.attr in ASKS
                and not dotted
                and not call.args
            )
            if not by_function and not by_method:
                continue
            tensor = call.args[0] if by_function else call.func.value  # type: ignore[attr-defined]
            test = next(
                (
                    each
                    for each in event.source.parents(call)
                    if isinstance(each, (ast.If, ast.While, ast.Assert, ast.IfExp))
                ),
                None,
            )
            asked = (
                test is not None
                and any(each is call for each in ast.walk(test.test))
                and not any(isinstance(n, ast.And) for n in ast.walk(test.test))
            )
            if asked and from_step(program, loop, event.source, tensor):
                yield RULE.finding(
                    f"`{event.source.code(call)}` is a condition in every step: the host waits for the device each time",
                    event.place,
                    f"if step % 100 == 0 and {event.source.code(call)}:",
                )


RULE = Rule("FL102", "nan_check_every_step", Severity.TIME, __doc__, check)
