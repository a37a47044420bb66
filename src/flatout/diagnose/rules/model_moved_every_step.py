"""Every step moves the model to the device.

What:
    `model.to(device)` or `model.cuda()` is in the loop over batches.
Why it matters:
    After the first call it has no effect, but it visits every parameter and buffer in Python. For a large
    model, this takes milliseconds, while the device waits.
How to fix it:
    Move the model once, before creating the optimizer.
Example:
    import torch

  - model = torch.nn.Linear(4, 1)
  + model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
  -     model.cuda()  # <-
        optimizer.zero_grad()
        model(torch.randn(8, 4, device="cuda")).square().mean().backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        inside = {id(event.node) for event in loop.events}
        for event in loop.of("call"):
            call = event.node
            if (
                not loop.always(event)
                or not isinstance(call, ast.Call)
                or not isinstance(call.func, ast.Attribute)
                or call.func.attr not in ("to", "cuda")
            ):
                continue
            model = call.func.value
            origins = program.origins(event.source, model)
            if (
                "Module" in program.values.kinds(event.source, model)
                and "Loss" not in program.values.kinds(event.source, model)
                and origins
                and all(
                    isinstance(origin.node, ast.Call) and id(origin.node) not in inside for origin in origins
                )
            ):
                yield RULE.finding(
                    f"`{event.source.code(call)}` visits every parameter in every step and has no effect after the first",
                    event.place,
                    f"{event.source.code(call)}  # once, before creating the optimizer",
                )


RULE = Rule("FL107", "model_moved_every_step", Severity.TIME, __doc__, check)
