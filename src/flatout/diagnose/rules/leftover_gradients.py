"""Gradients of an incomplete window enter the next epoch.

What:
    Gradients accumulate, and the optimizer steps if `(i + 1) % n == 0`. The index starts again in every epoch. The
    last batches of an epoch that do not fill a window cause no step, and nothing clears their gradients.
Why it matters:
    The first step of the next epoch adds the gradients of the left batches to those of a whole window. It has up to
    `2 n - 1` batches, each divided by `n`, and some of their gradients belong to older weights.
How to fix it:
    Step after the last batch, too: `if (i + 1) % n == 0 or i + 1 == len(loader)`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(10, 8, 4)
    for epoch in range(3):
        for i, x in enumerate(batches):
            loss = model(x).square().mean() / 4
            loss.backward()
  -         if (i + 1) % 4 == 0:  # <-
  +         if (i + 1) % 4 == 0 or i + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.step_off_by_one import start_of
from flatout.diagnose.rules.zero_grad_in_window import window
from flatout.probe.call_chain import passed
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop, loops_over
from flatout.probe.value_paths import returns
from flatout.probe.windows import last_name, resolved, size_of, window_of
from flatout.schema.findings import Finding, Severity

DIVIDES = ("split", "chunk", "tensor_split")
ENDLESS = ("cycle", "repeat", "infinite", "endless", "forever", "inf_")
STEPS = ("step", "scaler_step")


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        gate = _gate(program, loop)
        if gate is None or not _restarts(program, loop) or _steps_elsewhere(program, loop):
            continue
        source, node, test = gate
        every = window_of(test)
        index = next((e for e in ast.walk(test) if every is not None and last_name(e) == every.index), None)
        if every is None or not isinstance(index, ast.Name):
            continue
        step = loop.of(*STEPS)[0]
        start = start_of(loop, step, index) if _starts_again(loop, *passed(step, index)) else None
        if start is None or not all(_right(every.holds, start, size) for size in every.sizes if size > 1):
            continue
        if not every.size.isdigit() or int(every.size) > 1:
            size = size_of(test)
            yield RULE.finding(
                f"the last batches of an epoch that do not fill a window of `{size}` never step: "
                "their gradients enter the first step of the next epoch",
                source.place(node.test),
                f"if {source.code(test)} or {every.index} + {1 - start} == len({_loader(loop)}):",
                others=[step.place],
            )


def _gate(program: ScriptProgram, loop: StepLoop) -> tuple[SourceFile, ast.If, ast.expr] | None:
    """Return the only condition of the steps, if it also encloses what clears the gradients after a step."""
    steps, zeros = loop.of(*STEPS), loop.of("zero_grad")
    found = [window(loop, step) for step in steps]
    if found[0] is None or any(each is not found[0] for each in found) or not zeros:
        return None
    gate = found[0]
    passes = [event for event in loop.of("backward") if loop.always(event)]
    inside = [zero for zero in zeros if any(node is gate for node, _, _ in zero.arms)]
    outside = [zero for zero in zeros if zero not in inside and not _skips(loop, zero)]
    source = next(home for node, _, home in loop.arms(steps[0]) if node is gate)
    test = resolved(source, gate.test)
    if not inside or outside or not passes or _or_another(test) or any(_scales(each) for each in loop.events):
        return None
    return source, gate, test


def _skips(loop: StepLoop, event: ProgramEvent) -> bool:
    """Return whether an event belongs to a batch that is left out: the arm around it ends with ``continue``."""
    return any(
        isinstance(each, ast.Continue) for node, arm, _ in loop.arms(event) for each in getattr(node, arm, [])
    )


def _scales(event: ProgramEvent) -> bool:
    """Return whether an event divides the gradients by what the window has, such as its tokens."""
    function = event.node.func if isinstance(event.node, ast.Call) else None
    return function is not None and (
        ("scal" in last_name(function) and "grad" in last_name(function))
        or (last_name(function) in ("div_", "mul_") and ".grad" in ast.unparse(function))
    )


def _or_another(test: ast.expr) -> bool:
    """Return whether a test holds in further passes, such as the last one."""
    return any(
        isinstance(each, ast.BoolOp) and isinstance(each.op, ast.Or) for each in ast.walk(test)
    ) or any(isinstance(each, ast.Call) and last_name(each.func) == "len" for each in ast.walk(test))


def _restarts(program: ScriptProgram, loop: StepLoop) -> bool:
    """Return whether the loop runs over batches once per pass of a loop around it, and ends by itself."""
    if not loop.outer or not isinstance(loop.loop.node, ast.For):
        return False
    around = loop.outer[-1].node
    epochs = around.iter if isinstance(around, ast.For) else None
    if isinstance(epochs, ast.Call) and [ast.unparse(each) for each in epochs.args] == ["1"]:
        return False
    over = loops_over(loop.loop.node)
    if over is None or any(word in ast.unparse(loop.loop.node.iter).lower() for word in ENDLESS):
        return False
    if isinstance(over, ast.Call) and last_name(over.func) in ("range", "trange"):
        return len(over.args) == 1 and last_name(over.args[0]).startswith("len(")
    if isinstance(over, ast.Call) and last_name(over.func) in DIVIDES:
        return False  # the program divides its data itself, mostly into whole windows
    return not any(_endless(program, each.source, each.node) for each in program.origins(loop.source, over))


def _endless(program: ScriptProgram, source: SourceFile, node: ast.AST) -> bool:
    """Return whether a value is a generator of the program with ``while True``, or an endless iterator."""
    if not isinstance(node, ast.Call):
        return False
    if source.dotted(node.func).startswith("itertools."):
        return True
    functions = [function for _, function in program.functions_called(source, node)]
    functions += [
        method
        for home, klass in program.class_named(source, node.func)
        for _, method in program.methods(home, klass, "__iter__")
    ]
    return any(
        isinstance(each, ast.While) and isinstance(each.test, ast.Constant)
        for function in functions
        if isinstance(function, FUNCTIONS) and not returns(function)
        for each in ast.walk(function)
    )


def _steps_elsewhere(program: ScriptProgram, loop: StepLoop) -> bool:
    """Return whether the epoch has a further step or clears gradients outside the window, or its length is cut."""
    around = [event for event in [*loop.around, *loop.apart] if event.kind in (*STEPS, "zero_grad")]
    repeats = {id(visit) for visit in loop.outer}
    if any(event.kind != "zero_grad" or repeats & {id(each) for each in event.loops} for event in around):
        return True
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mod)
        and last_name(node.left).startswith("len(")
        for source in program.sources
        for node in source.nodes
    )


def _starts_again(loop: StepLoop, source: SourceFile, index: ast.expr) -> bool:
    """Return whether the index is set by the loop, or in each pass of the loop around it."""
    bindings = source.names.lookup(index) if isinstance(index, ast.Name) else []
    top, home = loop.outer[-1].node, loop.outer[-1].source
    return bool(bindings) and all(
        each.node is loop.loop.node
        or each.how == "augment"
        or any(above is top for above in source.parents(each.node))
        or (source.function(each.node) is not None and source.function(each.node) is not home.function(top))
        for each in bindings
    )


def _right(holds: object, start: int, size: int) -> bool:
    """Return whether the first window has ``size`` batches; if not, the condition is off by one."""
    assert callable(holds)
    first = next((at for at in range(start, start + 3 * size) if holds(at, size)), None)
    return first is not None and first - start + 1 == size


def _loader(loop: StepLoop) -> str:
    over = loops_over(loop.loop.node)
    return loop.source.code(over) if over is not None else "loader"


RULE = Rule("FL042", "leftover_gradients", Severity.WRONG, __doc__, check, weight=-1)
