"""The scheduler steps before the optimizer.

What:
    In a pass of a loop, `scheduler.step()` comes before `optimizer.step()`.
Why it matters:
    The first value of the schedule is skipped, and every later value comes one pass too early. Warm-up starts
    at its second value, and a drop after 30 epochs comes after 29. PyTorch warns once, among other lines, and
    continues.
How to fix it:
    Call `scheduler.step()` after the optimizer steps, at the end of the same pass.
Bad:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    for epoch in range(90):
        scheduler.step()  # <-
        for _ in range(100):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
Good:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    for epoch in range(90):
        for _ in range(100):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
        scheduler.step()
Sources:
    https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
    (the order changed in torch 1.1)
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import together
from flatout.schema.findings import Finding, Severity


def look(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        steps = loop.of("step", "scaler_step")
        for event in [*loop.around, *loop.events]:
            if (
                event.kind != "scheduler"
                or event.subject is None
                or not program.values.is_a(event.source, event.subject, "Scheduler")
                or not event.loops
            ):
                continue
            own = event.loops[-1]
            met = [step for step in steps if own in step.loops and together(step, event)]
            if (
                not met
                or len(met) != len(steps)
                or event.arms[own.arms :]
                or (own is loop.loop and not all(loop.always(step) for step in steps))
            ):
                continue
            order = {id(each): at for at, each in enumerate(program.events)}
            if order[id(event)] < min(order[id(step)] for step in met):
                name = event.source.code(event.node)
                yield RULE.finding(
                    f"`{name}` runs before `{met[0].source.code(met[0].node)}` on line {met[0].place.line}: the first learning rate of the "
                    "schedule is never used",
                    event.place,
                    f"{name}  # at the end of the loop body",
                    others=[met[0].place],
                )


RULE = Rule("FL011", "scheduler_before_optimizer", Severity.WRONG, __doc__, look=look)
