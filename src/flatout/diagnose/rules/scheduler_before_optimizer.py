"""The scheduler steps before the optimizer.

What:
    In a pass of a loop, or in a function that trains for one epoch, `scheduler.step()` comes before
    `optimizer.step()`.
Why it matters:
    The first value of the schedule is skipped, and every later value comes one pass too early. Warm-up starts
    at its second value, and a drop after 30 epochs comes after 29. PyTorch warns once, among other lines, and
    continues.
How to fix it:
    Call `scheduler.step()` after the optimizer steps, at the end of the same pass.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30)
    for epoch in range(90):
  -     scheduler.step()  # <-
        for _ in range(100):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            optimizer.step()
  +     scheduler.step()
Sources:
    https://docs.pytorch.org/docs/stable/optim.html#how-to-adjust-learning-rate
    (the order changed in torch 1.1)
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.call_chain import origins, passed
from flatout.probe.kinds import called_like
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, implies, together
from flatout.schema.findings import Finding, Severity

STEPS = ("step", "scaler_step")


def check(program: ScriptProgram) -> Iterator[Finding]:
    if any(
        isinstance(node, ast.Attribute)
        and node.attr == "last_epoch"
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") != "self"
        for _, node in program.nodes(ast.Attribute)
    ):
        return  # the first call may be meant to reach the first value
    order = {id(event): at for at, event in enumerate(program.events)}
    for event in program.events:
        if event.kind != "scheduler" or not _of_learning_rates(program, event):
            continue
        around = _of_its_loop(program, event) if event.loops else _of_its_epoch(program, event)
        steps = [step for step in around if not _of_another(program, event, step)]
        if event.loops and not _regular(program, event, steps):
            continue
        every = [step for step in steps if implies(step, event)]
        if every and all(together(step, event) and order[id(event)] < order[id(step)] for step in steps):
            name = event.source.code(event.node)
            yield RULE.finding(
                f"`{name}` runs before `{every[0].source.code(every[0].node)}` on line {every[0].place.line}: the first learning rate of the "
                "schedule is never used",
                event.place,
                f"{name}  # at the end of the {'loop body' if event.loops else 'function'}",
                others=[every[0].place],
            )


def _of_its_loop(program: ScriptProgram, event: ProgramEvent) -> list[ProgramEvent]:
    """Return the steps of optimizers in the innermost loop around the event, if that loop trains."""
    own = event.loops[-1]
    if not any(own is loop.loop or own in loop.outer for loop in program.step_loops):
        return []
    return [step for step in program.events if step.kind in STEPS and own in step.loops]


def _of_its_epoch(program: ScriptProgram, event: ProgramEvent) -> list[ProgramEvent]:
    """Return the steps in loops of the function of the event, if an epoch is one of its parameters."""
    function = event.frames[-1] if event.frames else None
    if not isinstance(function, FUNCTIONS) or not any(
        "epoch" in each.arg and "epochs" not in each.arg for each in function.args.args
    ):
        return []
    return [
        step
        for step in program.events
        if step.kind in STEPS and step.loops and step.frames[: len(event.frames)] == event.frames
    ]


def _regular(program: ScriptProgram, event: ProgramEvent, steps: list[ProgramEvent]) -> bool:
    """Return whether the optimizer steps whenever the scheduler does, not only every few passes of its loop."""
    own = event.loops[-1]
    return all(own is not loop.loop for loop in program.step_loops) or all(
        step.loops[-1] is own and step.arms in (event.arms, event.arms[: own.arms]) for step in steps
    )


def _of_learning_rates(program: ScriptProgram, event: ProgramEvent) -> bool:
    """Return whether this is a call ``scheduler.step()`` of a scheduler of learning rates.

    A call with arguments sets the value of the given epoch, so it may come first.
    """
    assert isinstance(event.node, ast.Call)
    if event.subject is None or event.node.args or event.node.keywords:
        return False
    source, subject = passed(event, event.subject)
    known = program.values.kinds(source, subject) - {"NoneType"}
    name = getattr(subject, "attr", "") or getattr(subject, "id", "")
    return "Scheduler" in known if known else called_like(name, "Scheduler") and not _other_rate(name)


def _other_rate(name: str) -> bool:
    """Return whether a name says that the scheduler sets something else, as in ``noise_scheduler``."""
    before = name.lower().strip("_").partition("sched")[0].strip("_")
    return bool(before) and not before.endswith(("lr", "learning_rate", "optimizer", "optim"))


def _of_another(program: ScriptProgram, event: ProgramEvent, step: ProgramEvent) -> bool:
    """Return whether the step is of an optimizer that the scheduler is known not to change."""
    if step.subject is None or event.subject is None:
        return False
    own = [
        pair
        for origin in origins(program, event, event.subject)
        for pair in _optimizers(origin.source, origin.node)
    ]
    source, subject = passed(step, step.subject)
    return bool(own) and all(program.values.same(home, each, source, subject) is False for home, each in own)


def _optimizers(source: SourceFile, made: ast.AST) -> Iterator[tuple[SourceFile, ast.expr]]:
    """Yield the optimizer that a call gives to a scheduler."""
    if isinstance(made, ast.Call):
        named = [k.value for k in made.keywords if k.arg == "optimizer"]
        yield from ((source, each) for each in named or made.args[:1])


RULE = Rule("FL011", "scheduler_before_optimizer", Severity.WRONG, __doc__, check)
