"""Gradients are cleared inside the accumulation window.

What:
    The optimizer steps once per several batches (`if (i + 1) % n == 0`, or after an inner loop).
    `zero_grad()` runs for every batch.
Why it matters:
    When the optimizer steps, only the gradients of the last batch of the window are left. The work of all
    other batches is lost, and the effective batch size is not the one in the script.
How to fix it:
    Clear the gradients where the optimizer steps, directly after `step()`.
Bad:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        optimizer.zero_grad()  # <-
        loss = model(torch.randn(8, 4)).square().mean() / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
Good:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        loss = model(torch.randn(8, 4)).square().mean() / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Finding, Severity


def look(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for step in loop.of("step", "scaler_step"):
            for zero in loop.of("zero_grad"):
                clears = loop.zeroes(program, zero, step)
                if not (
                    clears or (clears is None and zero.subject is not None and loop.one_optimizer(program))
                ):
                    continue
                if _every_batch(loop, zero, step):
                    call = zero.source.code(zero.node)
                    yield RULE.finding(
                        f"the gradients are cleared for every batch, but `{step.source.code(step.node)}` on line {step.place.line} runs only "
                        "after several: all gradients except the last are lost",
                        zero.place,
                        f"{call}  # directly after the step",
                        others=[step.place],
                    )


def window(loop: StepLoop, step: ProgramEvent) -> ast.If | None:
    """Return the ``if`` with a modulo in its test that makes an optimizer step only every few passes."""
    return next(
        (
            node
            for node, arm, _ in loop.arms(step)
            if arm == "body"
            and isinstance(node, ast.If)
            and step.loops[-1] is loop.loop
            and any(isinstance(each, ast.Mod) for each in ast.walk(node.test))
        ),
        None,
    )


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


RULE = Rule("FL004", "zero_grad_in_window", Severity.WRONG, __doc__, look=look)
