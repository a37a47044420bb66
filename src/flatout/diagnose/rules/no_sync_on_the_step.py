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
Example:
    import contextlib

    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
  -     with model.no_sync() if i % 4 != 0 else contextlib.nullcontext():  # <-
  +     with model.no_sync() if (i + 1) % 4 != 0 else contextlib.nullcontext():
            loss = model(torch.randn(8, 4)).square().mean() / 4
            loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html (no_sync)
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_in_window import window, window_test
from flatout.probe.call_chain import passed
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import iterated
from flatout.probe.windows import Window, condition, last_name, resolved, window_of
from flatout.schema.findings import Finding, Severity

NO_SYNC = ("no_sync", "no_backward_sync")
SWITCHES = ("require_backward_grad_sync", "set_requires_gradient_sync")  # True for an exchange


def check(program: ScriptProgram) -> Iterator[Finding]:
    if not program.mentions(*NO_SYNC, *SWITCHES):
        return
    for loop in program.step_loops:
        for backward in loop.of("backward"):
            stepping, line = _stepping(loop, backward)
            for source, test, holds in _left_out(loop, backward) if stepping is not None else ():
                assert stepping is not None
                apart = condition(resolved(source, test), holds, stepping.index, stepping.size)
                if apart is None or _counted(loop, apart) or not _meet(apart, stepping):
                    continue
                if not all(_same_index(event, stepping) for event in loop.of("step", "scaler_step")):
                    continue
                yield RULE.finding(
                    f"the micro-batch after which the optimizer steps, `{ast.unparse(stepping.test)}` on line {line}, runs without the "
                    "exchange between devices: each device steps with its own gradients",
                    source.place(test),
                    f"not ({ast.unparse(stepping.test)})  # the condition for leaving out the exchange",
                    others=[loop.of("step", "scaler_step")[0].place],
                )


def _stepping(loop: StepLoop, backward: ProgramEvent) -> tuple[Window | None, int]:
    """Return the condition of the micro-batches after which the optimizer steps, and the line that sets it."""
    steps = loop.of("step", "scaler_step")
    gates = [window(loop, step) for step in steps]
    if gates[0] is not None and all(gate is gates[0] for gate in gates):
        test = window_test(loop, steps[0])
        return (window_of(test) if test is not None else None), gates[0].lineno
    inner = backward.loops[-1].node
    if isinstance(inner, ast.For) and all(step.loops[-1] is loop.loop for step in steps):
        return _last_of(inner), inner.lineno
    return None, 0


def _last_of(loop: ast.For) -> Window | None:
    """Return the condition that a pass of ``for i in range(n)`` or ``for i, x in enumerate(xs)`` is the last."""
    name = getattr(loop.iter.func, "id", "") if isinstance(loop.iter, ast.Call) else ""
    if name == "range" and isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 1:
        index, size = loop.target, last_name(loop.iter.args[0])
    elif name == "enumerate" and isinstance(loop.target, ast.Tuple) and len(loop.iter.args) == 1:  # type: ignore[attr-defined]
        index, size = loop.target.elts[0], f"len({last_name(iterated(loop.iter))})"
    else:
        return None
    if not isinstance(index, ast.Name) or not size or size == "len()":
        return None
    test = ast.parse(f"{index.id} == {size} - 1", mode="eval").body
    return condition(test, True, index.id, size)


def _meet(apart: Window, stepping: Window) -> bool:
    """Return whether a micro-batch that steps is left out, whatever the number of micro-batches."""
    return all(
        any(apart.holds(at, size) and stepping.holds(at, size) for at in range(4 * size))
        for size in stepping.sizes
    )


def _same_index(step: ProgramEvent, stepping: Window) -> bool:
    """Return whether callers pass the index on as it is, not ``i + 1``."""
    return all(
        last_name(passed(step, node)[1]) == stepping.index
        for node in ast.walk(stepping.test)
        if isinstance(node, ast.Name) and node.id == stepping.index
    )


def _counted(loop: StepLoop, apart: Window) -> bool:
    """Return whether the loop counts the index itself, perhaps between the two tests."""
    return any(
        isinstance(event.node, ast.AugAssign) and last_name(event.node.target) == apart.index
        for event in loop.events
    )


def _left_out(loop: StepLoop, backward: ProgramEvent) -> Iterator[tuple[SourceFile, ast.expr, bool]]:
    """Yield the tests, and their values, under which the exchange is left out of a backward pass."""
    for source, block in backward.blocks:
        enabled = [k.value for k in getattr(block, "keywords", []) if k.arg == "enabled"]
        if _leaves_out(block) and enabled:
            yield source, enabled[0], True
        elif _leaves_out(block):
            for node, arm, home in loop.arms(backward):
                if isinstance(node, ast.If):
                    yield home, node.test, arm == "body"
        else:
            yield from _tests(source, block)
    switches = [(event.source, test) for event in loop.events if (test := _switch(event)) is not None]
    if len(switches) == 1:
        yield *switches[0], False


def _switch(event: ProgramEvent) -> ast.expr | None:
    """Return the condition of ``model.require_backward_grad_sync = last`` and of a call that sets the same."""
    node = event.node
    if isinstance(node, ast.Assign) and any(getattr(each, "attr", "") in SWITCHES for each in node.targets):
        return node.value
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SWITCHES and node.args:
        return node.args[0]
    return None


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


RULE = Rule("FL037", "no_sync_on_the_step", Severity.WRONG, __doc__, check)
