"""Every micro-batch averages the gradients between devices.

What:
    The model is a `DistributedDataParallel`, or an `Accelerator` or `Fabric` set it up. Several backward passes accumulate
    gradients before a step. `no_sync()` is not used.
Why it matters:
    Every backward pass sends all gradients over the network, but only their sum is needed. With n
    micro-batches, this multiplies the traffic by n.
How to fix it:
    Put `with model.no_sync():` around the forward and backward passes of all micro-batches except the last.
    With an `Accelerator`, this is `with accelerator.no_sync(model):`.
Example:
  + import contextlib
  +
    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
  -     loss = model(torch.randn(8, 4)).square().mean() / 4
  -     loss.backward()  # <-
  -     if (i + 1) % 4 == 0:
  +     last = (i + 1) % 4 == 0
  +     with contextlib.nullcontext() if last else model.no_sync():
  +         loss = model(torch.randn(8, 4)).square().mean() / 4
  +         loss.backward()
  +     if last:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_in_window import window
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop, together
from flatout.probe.windows import counts, resolved
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions(
        "no_sync", "no_backward_sync", "require_backward_grad_sync", "set_requires_gradient_sync"
    ):
        return
    for loop in program.step_loops:
        steps, passes = loop.of("step", "scaler_step"), loop.of("backward")
        gated = all(window(loop, step) is not None for step in steps) and _every_batch(loop, passes)
        if not gated and not _inner_loop(loop, steps, passes):
            continue
        source, node = loop.loop.reached(passes[0])
        without = _of_a_launcher(program, passes[0]) or ("model.no_sync()" if _wrapped(program, loop) else "")
        if without:
            yield RULE.finding(
                f"every backward pass averages the gradients between all devices, but the optimizer steps only on line {steps[0].place.line}",
                source.place(node),
                f"with {without}:  # for all micro-batches except the last",
                others=[*([passes[0].place] if node is not passes[0].node else []), steps[0].place],
            )


def _every_batch(loop: StepLoop, passes: list[ProgramEvent]) -> bool:
    """Return whether each micro-batch has one backward pass. The arms of an ``if`` may have one each."""
    direct = bool(passes) and all(event.loops[-1] is loop.loop for event in passes)
    counted = any(
        isinstance(node, ast.If) and counts(resolved(source, node.test))
        for event in passes
        for node, _, source in loop.arms(event)
    )
    apart = all(not together(one, other) for one in passes for other in passes if one is not other)
    return direct and not counted and apart


def _inner_loop(loop: StepLoop, steps: list[ProgramEvent], passes: list[ProgramEvent]) -> bool:
    """Return whether the backward pass is in a loop over micro-batches, and the optimizer steps after it."""
    if len(passes) != 1 or any(step.loops[-1] is not loop.loop for step in steps):
        return False
    inner = passes[0].loops[-1]
    return (
        passes[0].loops[:-1][-1:] == (loop.loop,)
        and isinstance(inner.node, ast.For)
        and not passes[0].arms[inner.arms :]
        and inner.arms == loop.loop.arms
    )


def _wrapped(program: ScriptProgram, loop: StepLoop) -> bool:
    return any(
        isinstance(event.node, ast.Call)
        and any(
            origin.dotted.endswith("DistributedDataParallel")
            for origin in program.origins(event.source, event.node.func)
        )
        for event in loop.of("call")
    )


def _of_a_launcher(program: ScriptProgram, backward: ProgramEvent) -> str:
    """Return how the Accelerator or Fabric that runs the backward pass leaves out the exchange, or "".

    An Accelerator with ``accumulate`` leaves it out by itself.
    """
    call = backward.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return ""
    source, owner = backward.source, call.func.value
    if program.values.seems(source, owner, "Fabric") and program.mentions("setup", "setup_module"):
        return f"{source.code(owner)}.no_backward_sync(model)"
    if program.values.seems(source, owner, "Accelerator") and program.mentions("prepare", "prepare_model"):
        return "" if program.mentions("accumulate") else f"{source.code(owner)}.no_sync(model)"
    return ""


RULE = Rule("FL116", "accumulation_without_no_sync", Severity.TIME, __doc__, check)
