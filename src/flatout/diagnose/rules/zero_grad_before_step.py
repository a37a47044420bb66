"""Gradients are cleared between backward and step.

What:
    `zero_grad()` comes after `loss.backward()` and before `optimizer.step()`.
Why it matters:
    The step finds no gradients (`None`, or zeros), and the model learns nothing from this batch. With
    momentum or weight decay, the parameters still change, so it looks like training.
How to fix it:
    Use the order `zero_grad`, forward, `backward`, `step`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(100):
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
  +     optimizer.step()
        optimizer.zero_grad()  # <-
  -     optimizer.step()
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop, implies, together
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for step in loop.of("step", "scaler_step"):
            dropping = _dropping(program, loop, step)
            if dropping is not None:
                name = dropping.source.code(dropping.node)
                yield RULE.finding(
                    f"`{name}` discards the gradients before `{step.source.code(step.node)}` on line {step.place.line} can use them",
                    dropping.place,
                    f"{name}  # before the forward pass, or after the step",
                    others=[step.place],
                )


def _dropping(program: ScriptProgram, loop: StepLoop, step: ProgramEvent) -> ProgramEvent | None:
    """Return the last zero_grad between a backward pass and a step, or None."""
    found = None
    for event in reversed(loop.events[: loop.events.index(step)]):
        if not together(event, step):
            continue
        if event.kind == "backward":
            return found
        if event.kind in ("step", "scaler_step"):
            same = (
                step.subject is not None
                and event.subject is not None
                and program.values.same(event.source, event.subject, step.source, step.subject)
            )
            if same is not False:
                return None
        if event.kind == "zero_grad" and implies(step, event) and event.loops == step.loops:
            clears = loop.zeroes(program, event, step)
            if clears or (clears is None and event.subject is not None and loop.one_optimizer(program)):
                found = event
    return None


RULE = Rule("FL003", "zero_grad_before_step", Severity.WRONG, __doc__, check)
