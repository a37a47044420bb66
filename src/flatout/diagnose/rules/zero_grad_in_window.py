"""Gradients are cleared inside the accumulation window.

What:
    The optimizer steps once per several batches: `if (i + 1) % n == 0`, after an inner loop, in a method of its
    own, or as the optimizer that `accelerator.prepare` wraps. The gradients are cleared for every batch.
Why it matters:
    When the optimizer steps, only the gradients of the last batch of the window are left. The work of all
    other batches is lost, and the effective batch size is not the one in the script.
How to fix it:
    Clear the gradients where the optimizer steps, directly after `step()`. Under `accelerator.accumulate`, use
    `optimizer.zero_grad()` of the prepared optimizer: it waits like its `step()`. `model.zero_grad()` does not.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
  -     optimizer.zero_grad()  # <-
        loss = model(torch.randn(8, 4)).square().mean() / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
  +         optimizer.zero_grad()
"""

import ast
from collections.abc import Iterator
from dataclasses import replace

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.windows import counts, resolved
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for step in loop.of("step", "scaler_step"):
            for zero in loop.of("zero_grad"):
                clears = loop.zeroes(program, zero, step)
                if not (
                    clears or (clears is None and zero.subject is not None and loop.one_optimizer(program))
                ):
                    continue
                if _every_batch(loop, zero, step):
                    yield _finding(
                        zero, step, "runs only after several: all gradients except the last are lost"
                    )
    yield from _under_accumulate(program)
    yield from _methods_apart(program)


def _finding(zero: ProgramEvent, step: ProgramEvent, said: str) -> Finding:
    call = zero.source.code(zero.node)
    return RULE.finding(
        f"the gradients are cleared for every batch, but `{step.source.code(step.node)}` on line {step.place.line} {said}",
        zero.place,
        f"{call}  # directly after the step",
        others=[step.place],
    )


def window(loop: StepLoop, step: ProgramEvent) -> ast.If | None:
    """Return the ``if`` with a modulo in its test that makes an optimizer step only every few passes."""
    return next(
        (
            node
            for node, arm, source in loop.arms(step)
            if arm == "body"
            and isinstance(node, ast.If)
            and step.loops[-1] is loop.loop
            and counts(resolved(source, node.test))
        ),
        None,
    )


def window_test(loop: StepLoop, step: ProgramEvent) -> ast.expr | None:
    """Return the test with the modulo of ``window``, even if a name stands for it."""
    gate = window(loop, step)
    sources = [source for node, _, source in loop.arms(step) if node is gate]
    return resolved(sources[0], gate.test) if gate is not None else None


def _every_batch(loop: StepLoop, zero: ProgramEvent, step: ProgramEvent) -> bool:
    gate = window(loop, step)
    passes = loop.of("backward")
    if gate is not None:
        free = [event for event in passes if loop.always(event)]
        return loop.always(zero) and len(free) == len(passes)
    inner = zero.loops[-1]
    return (
        inner is not loop.loop
        and step.loops[-1] is loop.loop
        and zero.loops == passes[0].loops
        and not zero.arms[inner.arms :]
        and all(event.loops == zero.loops for event in passes)
        and loop.events.index(step) > loop.events.index(zero)
    )


def _under_accumulate(program: ScriptProgram) -> Iterator[Finding]:
    """Yield what clears gradients in every pass of ``with accelerator.accumulate(model):``.

    Only the methods of a prepared optimizer do nothing while gradients accumulate.
    """
    for loop in program.step_loops:
        for step in loop.of("step"):
            blocks = [(source, block) for source, block in step.blocks if accumulates(program, source, block)]
            for zero in loop.of("zero_grad") if blocks else ():
                if blocks[0] not in zero.blocks or _only_at_the_step(loop, zero):
                    continue
                if zero.subject is None or _is_model(program, zero, blocks[0][1]):
                    found = _finding(
                        zero, step, "waits while gradients accumulate: all gradients except the last are lost"
                    )
                    optimizer = step.source.code(step.subject) if step.subject is not None else "optimizer"
                    yield replace(found, fix=f"{optimizer}.zero_grad()  # of the prepared optimizer")


def accumulates(program: ScriptProgram, source: SourceFile, block: ast.expr) -> bool:
    """Return whether a block is ``accelerator.accumulate(model)``, and its Accelerator is not known to be without steps."""
    if not (
        isinstance(block, ast.Call)
        and isinstance(block.func, ast.Attribute)
        and block.func.attr == "accumulate"
        and program.values.seems(source, block.func.value, "Accelerator")
    ):
        return False
    made = [each.node for each in program.origins(source, block.func.value) if each.dotted]
    return not made or any(
        keyword.arg is None
        or keyword.arg.startswith("gradient_accumulation")
        or keyword.arg == "deepspeed_plugin"
        for call in made
        if isinstance(call, ast.Call)
        for keyword in call.keywords
    )


def _only_at_the_step(loop: StepLoop, zero: ProgramEvent) -> bool:
    return any(
        isinstance(node, ast.If) and "sync_gradients" in ast.unparse(node.test)
        for node, _, _ in loop.arms(zero)
    )


def _is_model(program: ScriptProgram, zero: ProgramEvent, block: ast.expr) -> bool:
    assert zero.subject is not None
    return program.values.is_a(zero.source, zero.subject, "Module") or (
        isinstance(block, ast.Call) and any(ast.dump(each) == ast.dump(zero.subject) for each in block.args)
    )


def _methods_apart(program: ScriptProgram) -> Iterator[Finding]:
    """Yield a ``zero_grad`` before the backward pass in one method of a class, if another method steps.

    Other code decides how often it calls the first method before the second.
    """
    by_method: dict[int, list[ProgramEvent]] = {}
    for event in program.events:
        if not event.loops and event.source.parent(event.root) is not None:
            by_method.setdefault(id(event.root), []).append(event)
    for events in by_method.values():
        zeros = [event for event in events if event.kind == "zero_grad" and not event.arms]
        if not zeros or any(event.kind in ("step", "scaler_step") for event in events):
            continue
        backward = [event for event in events if event.kind == "backward"]
        klass = zeros[0].source.parent(zeros[0].root)
        for step in _steps_of(by_method, klass):
            for zero in zeros:
                if backward and events.index(zero) < events.index(backward[0]) and _own(zero, step):
                    name = getattr(step.root, "name", "")
                    yield _finding(
                        zero, step, f"is in `{name}`: if two batches come before it, the first is lost"
                    )


def _steps_of(by_method: dict[int, list[ProgramEvent]], klass: ast.AST | None) -> Iterator[ProgramEvent]:
    """Yield the steps in methods of a class that neither clear gradients nor compute them."""
    for events in by_method.values():
        if not isinstance(klass, ast.ClassDef) or events[0].source.parent(events[0].root) is not klass:
            continue
        if not any(event.kind in ("zero_grad", "backward") for event in events):
            yield from (event for event in events if event.kind == "step")


def _own(zero: ProgramEvent, step: ProgramEvent) -> bool:
    """Return whether both act on one attribute of ``self``."""
    return all(
        isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
        for each in (zero.subject, step.subject)
    ) and ast.dump(zero.subject) == ast.dump(step.subject)  # type: ignore[arg-type]


RULE = Rule("FL004", "zero_grad_in_window", Severity.WRONG, __doc__, check)
