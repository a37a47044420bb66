"""The micro-batch that steps leaves out the exchange of gradients.

What:
    Gradients accumulate over several micro-batches, and `no_sync()` leaves out the exchange between devices for
    some of them. The condition of `no_sync()` also holds for the micro-batch after which the optimizer steps.
Why it matters:
    The gradients are averaged between devices only in a backward pass outside `no_sync()`. If the last
    micro-batch is inside it, each device steps with its own gradients, and the copies of the model drift apart.
How to fix it:
    Use one condition for both: compute `last = (i + 1) % n == 0` once, enter `no_sync()` if it is false, and step
    if it is true.
Bad:
    import contextlib

    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        with model.no_sync() if i % 4 != 0 else contextlib.nullcontext():  # <-
            loss = model(torch.randn(8, 4)).square().mean() / 4
            loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
Good:
    import contextlib

    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        with model.no_sync() if (i + 1) % 4 != 0 else contextlib.nullcontext():
            loss = model(torch.randn(8, 4)).square().mean() / 4
            loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_in_window import window
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.windows import Window, window_of
from flatout.schema.findings import Finding, Severity

NO_SYNC = ("no_sync", "no_backward_sync")
SIZES = range(2, 6)  # numbers of micro-batches that are tried


def look(program: ScriptProgram) -> Iterator[Finding]:
    if not program.mentions(*NO_SYNC):
        return
    for loop in program.step_loops:
        steps, passes = loop.of("step", "scaler_step"), loop.of("backward")
        gates = {id(gate): gate for step in steps if (gate := window(loop, step)) is not None}
        if len(gates) != 1 or not all(window(loop, step) is not None for step in steps):
            continue
        gate = next(iter(gates.values()))
        stepping = window_of(gate.test)
        for backward in passes if stepping is not None else ():
            for source, test, holds in _left_out(backward, loop):
                apart = window_of(test, holds)
                if (
                    apart is None
                    or stepping is None
                    or not apart.comparable(stepping)
                    or _counted(loop, apart)
                ):
                    continue
                if _meet(apart, stepping):
                    yield RULE.finding(
                        f"the micro-batch after which the optimizer steps, `{ast.unparse(gate.test)}` on line {gate.lineno}, runs under "
                        "`no_sync()`: each device steps with its own gradients",
                        source.place(test),
                        f"not ({ast.unparse(gate.test)})  # the condition of no_sync()",
                        others=[steps[0].place],
                    )


def _meet(apart: Window, stepping: Window) -> bool:
    """Return whether a micro-batch that steps is under ``no_sync()``, whatever the number of micro-batches."""
    return all(
        any(apart.holds(at, size) and stepping.holds(at, size) for at in range(4 * size)) for size in SIZES
    )


def _counted(loop: StepLoop, apart: Window) -> bool:
    """Return whether the loop counts the index itself, perhaps between the two tests."""
    return any(
        isinstance(event.node, ast.AugAssign)
        and getattr(event.node.target, "id", getattr(event.node.target, "attr", "")) == apart.index
        for event in loop.events
    )


def _left_out(backward: ProgramEvent, loop: StepLoop) -> Iterator[tuple[SourceFile, ast.expr, bool]]:
    """Yield the tests, and their values, under which ``no_sync()`` is around a backward pass."""
    for source, block in backward.blocks:
        if _leaves_out(block):
            for node, arm, home in loop.arms(backward):
                if isinstance(node, ast.If):
                    yield home, node.test, arm == "body"
        else:
            yield from _tests(source, block)


def _tests(
    source: SourceFile, block: ast.expr, depth: int = 0
) -> Iterator[tuple[SourceFile, ast.expr, bool]]:
    """Yield the tests in an expression of a context: ``model.no_sync() if i % n else nullcontext()``."""
    if isinstance(block, ast.IfExp):
        for branch, holds in ((block.body, True), (block.orelse, False)):
            if _leaves_out(branch):
                yield source, block.test, holds
    elif isinstance(block, ast.Call) and isinstance(block.func, (ast.Name, ast.IfExp)):
        yield from _tests(source, block.func, depth + 1)
    elif isinstance(block, ast.Name) and depth < 4:
        for binding in source.names.reaching(block):
            if binding.how != "assign" or binding.value is None or binding.path:
                continue
            if _leaves_out(binding.value):
                for node, arm in source.names.arms(binding.node)[:1]:
                    yield source, node.test, arm == "body"
            else:
                yield from _tests(source, binding.value, depth + 1)


def _leaves_out(node: ast.expr) -> bool:
    """Return whether this is ``model.no_sync`` or a call of it."""
    target = node.func if isinstance(node, ast.Call) else node
    return isinstance(target, ast.Attribute) and target.attr in NO_SYNC


RULE = Rule("FL037", "no_sync_on_the_step", Severity.WRONG, __doc__, look=look)
