"""Gradients are never cleared.

What:
    A training loop calls `loss.backward()` and `optimizer.step()`, but never clears the gradients.
Why it matters:
    `backward()` adds to `.grad`. Each step then follows the sum of all gradients since the first one. The
    longer the run, the larger and more outdated the step. The loss can still fall for a while, so the error
    goes unnoticed.
How to fix it:
    Call `optimizer.zero_grad()` once in every training step, before its first `backward()` or after `step()`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        x = torch.randn(8, 4)
  +     optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()  # <-
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.optim.Optimizer.zero_grad.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import add_statement_after
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Edit, Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop, step in uncleared(program):
        if not [event for event in [*loop.around, *loop.apart] if event.kind == "zero_grad"]:
            name = step.source.code(step.subject) if step.subject is not None else "optimizer"
            yield RULE.finding(
                f"`{name}` steps here, but its gradients are never cleared: each step follows the sum of all gradients so far",
                step.place,
                f"{name}.zero_grad()  # before the forward pass of every cycle",
                edits=_edits(program, step),
            )


def _edits(program: ScriptProgram, step: ProgramEvent) -> list[Edit]:
    """Return the edit: the step clears what it has used. None if a call only lacks its parentheses."""
    uncalled = any(
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "zero_grad"
        for _, node in program.nodes(ast.Expr)
    )
    if uncalled or step.subject is None:
        return []
    return add_statement_after(step.source, step.node, f"{step.source.code(step.subject)}.zero_grad()")


def uncleared(program: ScriptProgram) -> Iterator[tuple[StepLoop, ProgramEvent]]:
    """Yield the optimizer steps whose loop never clears the gradients that they use."""
    for loop in program.step_loops:
        calls = [event for event in loop.of("call") if isinstance(event.node, ast.Call)]
        if any(
            event.source.dotted(event.node.func) == "torch.autograd.grad"
            for event in calls
            if isinstance(event.node, ast.Call)
        ):
            continue
        for step in loop.of("step", "scaler_step"):
            if step.subject is None or any(
                loop.zeroes(program, zero, step) is not False for zero in loop.of("zero_grad")
            ):
                continue
            if (
                not any(handed_over(program, event, step) for event in calls)
                and not _made_inside(program, loop, step)
                and not _of_unknown_class(program, step)
            ):
                yield loop, step


def handed_over(program: ScriptProgram, event: ProgramEvent, step: ProgramEvent) -> bool:
    """Return whether a function without visible source gets the optimizer: it may clear the gradients."""
    assert isinstance(event.node, ast.Call)
    if program.functions_called(event.source, event.node) or step.subject is None:
        return False
    handed = [*event.node.args, *(keyword.value for keyword in event.node.keywords)]
    return any(program.values.same(event.source, each, step.source, step.subject) for each in handed)


def _made_inside(program: ScriptProgram, loop: StepLoop, step: ProgramEvent) -> bool:
    assert step.subject is not None
    inside = {id(node) for node in ast.walk(loop.loop.node)}
    return any(id(origin.node) in inside for origin in program.origins(step.source, step.subject))


def _of_unknown_class(program: ScriptProgram, step: ProgramEvent) -> bool:
    """Return whether it is a wrapper from another module, whose ``step`` may clear the gradients itself."""
    assert step.subject is not None
    made = [origin.dotted for origin in program.origins(step.source, step.subject)]
    return any(name.endswith("Optimizer") and not name.startswith("torch.") for name in made)


RULE = Rule(
    "FL001",
    "zero_grad_missing",
    Severity.WRONG,
    __doc__,
    check,
    fix_changes="each step follows the gradients of its own batches",
)
