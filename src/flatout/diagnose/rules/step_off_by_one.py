"""The first optimizer step comes too early: the condition is off by one.

What:
    Gradients accumulate over `n` batches. The condition of the step holds in a pass other than the `n`-th, for
    example `i % n == 0` with an `i` that starts at 0.
Why it matters:
    The first step has the gradients of one batch, although each loss is divided by `n`. In every epoch, the last
    batches are left over, and they become part of the next epoch or are lost.
How to fix it:
    Step if `(i + 1) % n == 0`, and after the last batch of the epoch.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(100):
        loss = model(torch.randn(8, 4)).square().mean() / 4
        loss.backward()
  -     if i % 4 == 0:  # <-
  +     if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.zero_grad_in_window import window, window_test
from flatout.probe.call_chain import passed
from flatout.probe.names import Binding, position
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.windows import Window, last_name, size_of, window_of
from flatout.schema.findings import Finding, Severity

COUNTERS = {"range": "range", "trange": "range", "enumerate": "enumerate"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        steps, passes = loop.of("step", "scaler_step"), loop.of("backward")
        gates = [window(loop, step) for step in steps]
        if gates[0] is None or any(gate is not gates[0] for gate in gates):
            continue
        if not passes or loop.events.index(steps[0]) < loop.events.index(passes[0]):
            continue
        if not all(loop.always(event) for event in passes) or not _clears_at_the_step(loop, gates[0]):
            continue
        test = window_test(loop, steps[0])
        every = window_of(test) if test is not None else None
        index = _index(every, test) if every is not None and test is not None else None
        if index is None or every is None or _tested_again(loop, steps[0], gates[0], every.index):
            continue
        start = start_of(loop, steps[0], index)
        batches = _first_window(every, start) if start is not None else None
        if batches is None or test is None:
            continue
        source = next(home for node, _, home in loop.arms(steps[0]) if node is gates[0])
        yield RULE.finding(
            f"`{ast.unparse(test)}` holds first in pass {batches} of the loop: the first step has the gradients of "
            f"{'one batch' if batches == 1 else f'{batches} batches'}, not of {size_of(test)}",
            source.place(gates[0].test),
            f"if ({every.index} + 1) % {size_of(test)} == 0:"
            if start == 0
            else f"if {every.index} % {size_of(test)} == 0:",
            others=[steps[0].place],
        )


def _clears_at_the_step(loop: StepLoop, gate: ast.If) -> bool:
    zeros = loop.of("zero_grad")
    return bool(zeros) and all(
        (gate, "body") in [(node, arm) for node, arm, _ in zero.arms] for zero in zeros
    )


def _tested_again(loop: StepLoop, step: ProgramEvent, gate: ast.If, index: str) -> bool:
    """Return whether another condition of the step depends on the index, too."""
    return any(
        last_name(each) == index
        for node, _, _ in loop.arms(step)
        if isinstance(node, ast.If) and node is not gate
        for each in ast.walk(node.test)
    )


def _index(every: Window, test: ast.expr) -> ast.expr | None:
    """Return the expression of the index in a test with one modulo."""
    return next(
        (
            node
            for node in ast.walk(test)
            if isinstance(node, (ast.Name, ast.Attribute)) and last_name(node) == every.index
        ),
        None,
    )


def _first_window(every: Window, start: int) -> int | None:
    """Return the number of batches before the first step, or None if it is right for some size."""
    found = []
    for size in every.sizes:
        first = next((at for at in range(start, start + 3 * size) if every.holds(at, size)), None)
        if size < 2 or first is None or first - start + 1 == size:
            return None
        found.append(first - start + 1)
    return found[-1]


def start_of(loop: StepLoop, step: ProgramEvent, index: ast.expr) -> int | None:
    """Return the value of the index in the first test of the loop, or None if it is not visible."""
    source, node = passed(step, index)
    if isinstance(node, ast.Attribute):
        return _counted_attribute(loop, step, source, node)
    bindings = source.names.lookup(node) if isinstance(node, ast.Name) else []
    if len(bindings) == 1 and bindings[0].how == "for" and bindings[0].node is loop.loop.node:
        return _of_loop(bindings[0])
    if len(bindings) == 1 and bindings[0].how == "parameter" and loop.loop.node is source.function(node):
        return 0 if getattr(bindings[0].node, "arg", "") == "batch_idx" else None  # of Lightning
    counts = [each for each in bindings if each.how == "augment"]
    starts = [each for each in bindings if each.how == "assign"]
    if len(counts) != 1 or len(starts) != 1 or len(bindings) != 2 or source is not loop.source:
        return None
    value = starts[0].value
    if isinstance(value, ast.Tuple) and len(starts[0].path) == 1 and starts[0].path[0] < len(value.elts):
        value = value.elts[starts[0].path[0]]
    first = _number(value)
    event = next((each for each in loop.events if each.node is counts[0].node), None)
    if first is None or event is None or not loop.always(event) or not _by_one(counts[0].node):
        return None
    return first + (position(counts[0].node) < position(loop.loop.reached(step)[1]))


def _counted_attribute(
    loop: StepLoop, step: ProgramEvent, source: SourceFile, node: ast.Attribute
) -> int | None:
    """Return the value of ``self.steps`` in the first pass, if the class sets it once and the loop counts it once."""
    klass, written = source.klass(node), ast.unparse(node)
    if klass is None or not written.startswith("self."):
        return None
    pairs = [
        (each, value)
        for each in ast.walk(klass)
        if isinstance(each, (ast.Assign, ast.AugAssign, ast.AnnAssign))
        for target, value in _pairs(each)
        if ast.unparse(target) == written
    ]
    sets = [value for each, value in pairs if not isinstance(each, ast.AugAssign)]
    counts = [each for each, _ in pairs if isinstance(each, ast.AugAssign)]
    event = next((each for each in loop.events if counts and each.node is counts[0]), None)
    first = _number(sets[0]) if len(sets) == 1 else None
    if first is None or len(counts) != 1 or event is None or not loop.always(event) or not _by_one(counts[0]):
        return None
    return first + (loop.events.index(event) < loop.events.index(step))


def _pairs(node: ast.Assign | ast.AugAssign | ast.AnnAssign) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield the targets of an assignment with their values, also those of tuples."""
    for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
        value = node.value
        if not isinstance(target, ast.Tuple):
            yield target, value
        elif isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
            yield from zip(target.elts, value.elts, strict=True)
        else:
            yield from ((each, None) for each in target.elts)


def _of_loop(binding: Binding) -> int | None:
    """Return the first value of a loop variable: of ``range``, or the number of ``enumerate``."""
    call = binding.value
    while isinstance(call, ast.Call) and call.args and last_name(call.func) not in COUNTERS:
        call = call.args[0]  # of a progress bar
    if not isinstance(call, ast.Call) or not call.args:
        return None
    kind = COUNTERS.get(last_name(call.func))
    if kind == "enumerate" and binding.path == (0,):
        given = [*call.args[1:], *(k.value for k in call.keywords if k.arg == "start")]
        return _number(given[0]) if given else 0
    if kind == "range" and not binding.path and len(call.args) < 3:
        return _number(call.args[0]) if len(call.args) == 2 else 0
    return None


def _number(node: ast.expr | None) -> int | None:
    whole = (
        isinstance(node, ast.Constant) and isinstance(node.value, int) and not isinstance(node.value, bool)
    )
    return node.value if whole else None  # type: ignore[union-attr]


def _by_one(node: ast.AST) -> bool:
    return isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and _number(node.value) == 1


RULE = Rule("FL040", "step_off_by_one", Severity.WRONG, __doc__, check)
