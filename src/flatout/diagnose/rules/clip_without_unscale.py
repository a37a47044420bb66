"""Scaled gradients are clipped.

What:
    With a GradScaler, `clip_grad_norm_` runs before `scaler.unscale_(optimizer)`, or without it.
Why it matters:
    The scaler multiplies the loss by 65,536 or more. A norm limit of 1 then cuts every gradient to almost
    zero once it is unscaled. Training slows down or stalls, without an error.
How to fix it:
    Call `scaler.unscale_(optimizer)` directly before the clipping. `scaler.step` detects this and does not
    unscale again.
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
  +     scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <-
        scaler.step(optimizer)
        scaler.update()
Sources:
    https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-clipping
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import together
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        steps = loop.of("scaler_step")
        if not steps or not any(event.scaled for event in loop.of("backward")):
            continue
        for clip in loop.of("clip"):
            if not isinstance(clip.node, ast.Call) or not clip.source.dotted(clip.node.func).startswith(
                "torch."
            ):
                continue  # the clipping of a framework may unscale first
            step = next(
                (
                    event
                    for event in steps
                    if together(event, clip) and loop.events.index(event) > loop.events.index(clip)
                ),
                None,
            )
            before = [
                event
                for event in loop.of("unscale")
                if loop.events.index(event) < loop.events.index(clip) and together(event, clip)
            ]
            if (
                step is None
                or before
                or not isinstance(step.node, ast.Call)
                or not isinstance(step.node.func, ast.Attribute)
            ):
                continue
            scaler = step.source.code(step.node.func.value)
            optimizer = step.source.code(step.subject) if step.subject is not None else "optimizer"
            late = " (which runs only afterwards)" if loop.of("unscale") else ""
            yield RULE.finding(
                f"the gradients are clipped while they are still multiplied by the scaler's factor, before `{scaler}.unscale_`{late}",
                clip.place,
                f"{scaler}.unscale_({optimizer})\n{clip.source.code(clip.node)}",
                others=[step.place],
            )


RULE = Rule("FL008", "clip_without_unscale", Severity.WRONG, __doc__, check)
