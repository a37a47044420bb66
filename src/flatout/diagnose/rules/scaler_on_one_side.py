"""The scaler is used for the loss or the step, but not for both.

What:
    `scaler.scale(loss).backward()` is followed by `optimizer.step()` instead of `scaler.step(optimizer)`. Or
    `scaler.step(optimizer)` follows a plain `loss.backward()`.
Why it matters:
    In the first case, the optimizer uses gradients that are tens of thousands of times too large, including
    infinities. In the second case, `scaler.step` divides gradients that were never multiplied. They become
    about 65,536 times too small.
How to fix it:
    Use all three of `scaler.scale(loss).backward()`, `scaler.step(optimizer)` and `scaler.update()`, or none.
Example:
    import torch

    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for _ in range(100):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(torch.randn(8, 4, device="cuda")).square().mean()
        scaler.scale(loss).backward()
  -     optimizer.step()  # <-
  +     scaler.step(optimizer)
        scaler.update()
Sources:
    https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, implies, together
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        passes, scaler_steps = loop.of("backward"), loop.of("scaler_step")
        by_scaler = [event for event in passes if _by_scaler(program, event)]
        if scaler_steps and passes and not any(event.scaled for event in passes):
            step = scaler_steps[0]
            met = [event for event in passes if together(event, step) and implies(step, event)]
            if (
                met
                and met[-1].subject is not None
                and isinstance(step.node, ast.Call)
                and isinstance(step.node.func, ast.Attribute)
            ):
                scaler, loss = step.source.code(step.node.func.value), met[-1].source.code(met[-1].subject)
                yield RULE.finding(
                    f"`{step.source.code(step.node)}` on line {step.place.line} divides the gradients by the scaler's factor, but this loss "
                    "was never multiplied by it",
                    met[-1].place,
                    f"{scaler}.scale({loss}).backward()",
                    others=[step.place],
                )
        for step in loop.of("step") if len(by_scaler) == len(passes) and not loop.of("unscale") else ():
            met = [event for event in by_scaler if together(event, step) and implies(step, event)]
            if not met or any(together(event, step) for event in scaler_steps) or step.subject is None:
                continue
            if _of_a_stand_in(step):
                continue
            scaler, optimizer = _scaler(met[-1]), step.source.code(step.subject)
            yield RULE.finding(
                f"`{optimizer}` steps with gradients that are still multiplied by the scaler's factor (line {met[-1].place.line})",
                step.place,
                f"{scaler}.step({optimizer})",
                others=[met[-1].place],
            )


def _by_scaler(program: ScriptProgram, event: ProgramEvent) -> bool:
    """Return whether a loss goes through a known GradScaler."""
    call = (
        event.node.func.value
        if isinstance(event.node, ast.Call) and isinstance(event.node.func, ast.Attribute)
        else None
    )
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and program.values.is_a(event.source, call.func.value, "GradScaler")
    )


def _of_a_stand_in(step: ProgramEvent) -> bool:
    """Return whether a class of the program that scales losses makes the step, in place of a GradScaler."""
    klass = step.source.klass(step.node)
    return klass is not None and any(getattr(each, "name", "") == "scale" for each in klass.body)


def _scaler(event: ProgramEvent) -> str:
    scale = (
        event.node.func.value.func
        if isinstance(event.node, ast.Call)
        and isinstance(event.node.func, ast.Attribute)
        and isinstance(event.node.func.value, ast.Call)
        else None
    )
    return event.source.code(scale.value) if isinstance(scale, ast.Attribute) else "scaler"


RULE = Rule("FL009", "scaler_on_one_side", Severity.WRONG, __doc__, check)
