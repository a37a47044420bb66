"""The scaler is never updated.

What:
    `scaler.step(optimizer)` runs in the training loop, but `scaler.update()` never runs.
Why it matters:
    `update` lowers the factor after an overflow and raises it again later. Without it, an enabled scaler
    raises "step() has already been called since the last update()" in the second step. A disabled scaler (no
    GPU, or float32 by option) raises nothing, so the error appears only on the first run on a GPU.
How to fix it:
    Call `scaler.update()` directly after `scaler.step(optimizer)`, once per step, even with several
    optimizers.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda", enabled=torch.cuda.is_available())
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)  # <-
  +     scaler.update()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for step in loop.of("scaler_step"):
            call = step.node
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            known = program.values.is_a(step.source, call.func.value, "GradScaler")
            if known and not any(event.kind == "scaler_update" for event in [*loop.events, *loop.around]):
                scaler = step.source.code(call.func.value)
                yield RULE.finding(
                    f"`{scaler}` steps but is never updated: the second step raises an error, but only with a GPU",
                    step.place,
                    f"{scaler}.update()  # after this line",
                )


RULE = Rule("FL301", "scaler_update_missing", Severity.FRAGILE, __doc__, check)
