"""The model runs on a batch one sample at a time.

What:
    In the training loop, a `for` iterates over the samples of a batch and calls the model on each. Or a
    `forward` runs a layer on one time step after another, although no step needs the result of another. Or
    nested loops compute a tensor entry by entry.
Why it matters:
    A call on one sample costs almost as much as a call on many. It launches the same kernels and runs the
    same Python code, and the device is mostly idle. A batch of 64 takes up to 64 times as long.
How to fix it:
    Call the model once on the whole batch. Pad samples of different lengths. For per-sample gradients, use
    `torch.func.vmap`. Move the time dimension into the batch: `layer(x.flatten(0, 1)).unflatten(0, (n, steps))`.
    Replace loops over entries with broadcasting: `x[:, None]` and `y[None]`.
Example:
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(torch.randn(64, 4), batch_size=8):
        optimizer.zero_grad()
  -     loss = 0
  -     for i in range(x.size(0)):
  -         loss = loss + model(x[i]).square().sum()  # <-
  +     loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/func.html
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from flatout.diagnose.independent_loops import filled_entries, slice_calls
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile, Unreadable
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

MANY, MUCH = 100, 0.1  # operators of a loop in a step, and their share of the time of all operators


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.of("call"):
            call = event.node
            if not isinstance(call, ast.Call) or event.loops[-1] is loop.loop or len(call.args) != 1:
                continue
            kinds = program.values.kinds(event.source, call.func)
            batch = _batch(event)
            if (
                "Module" in kinds
                and "Loss" not in kinds
                and batch is not None
                and _from_loader(program, loop, event, batch)
            ):
                shown = event.source.code(call.func)
                yield RULE.finding(
                    f"`{shown}` is called on the samples of `{event.source.code(batch)}` one at a time",
                    event.place,
                    f"{shown}({event.source.code(batch)})  # once, for the whole batch",
                    others=[event.source.place(event.loops[-1].node)],
                )
    yield from _slices(program)
    yield from _entries(program)


def _slices(program: ScriptProgram) -> Iterator[Finding]:
    """Find a layer that `forward` runs on each slice of its input."""
    for source, klass in program.modules_defined():
        for method in klass.body:
            if isinstance(method, ast.FunctionDef):
                for loop, call, given in slice_calls(program, source, method):
                    layer, whole = source.code(call.func), source.code(given)
                    yield RULE.finding(
                        f"`{layer}` is called on the slices of `{whole}` one at a time, "
                        "although no call needs the result of another",
                        source.place(call),
                        f"{layer}({whole}.flatten(0, 1))  # once, for all slices",
                        others=[source.place(loop)],
                    )


def _entries(program: ScriptProgram) -> Iterator[Finding]:
    """Find nested loops that compute each entry of a tensor on its own.

    They must run in the training step, if the program has one: a module that is checked alone has none.
    """
    reached = program.of_each_step
    for source in program.sources:
        for function in source.functions:
            if program.step_loops and id(function) not in reached:
                continue
            for loop, statement, tensor in filled_entries(program, source, function):
                name = source.code(tensor)
                yield RULE.finding(
                    f"`{name}` is computed one entry at a time: each entry costs several tiny operations",
                    source.place(statement),
                    f"compute `{name}` at once from whole tensors, by broadcasting",
                    others=[source.place(loop)],
                )


def _batch(event: ProgramEvent) -> ast.expr | None:
    """Return ``x`` of a call on ``x[i]`` or ``x[i].unsqueeze(0)`` whose innermost loop runs ``i`` over x."""
    around = event.loops[-1].node
    given = event.node.args[0] if isinstance(event.node, ast.Call) else None
    if (
        isinstance(given, ast.Call)
        and isinstance(given.func, ast.Attribute)
        and given.func.attr in ("unsqueeze", "view", "reshape")
    ):
        given = given.func.value
    if (
        not isinstance(given, ast.Subscript)
        or not isinstance(around, ast.For)
        or not isinstance(around.target, ast.Name)
    ):
        return None
    lengths = {
        f"range({form.format(ast.unparse(given.value))})" for form in ("{}.size(0)", "{}.shape[0]", "len({})")
    }
    return (
        given.value
        if ast.unparse(given.slice) == around.target.id and ast.unparse(around.iter) in lengths
        else None
    )


def _from_loader(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, batch: ast.expr) -> bool:
    """Return whether a value is a batch of the training loader: its first dimension counts samples."""
    return "Tensor" in program.values.kinds(event.source, batch) and any(
        origin.node is loop.loop.node for origin in program.origins(event.source, batch)
    )


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    """Measure the independent loops of the source: the calls and the share of the operators inside them."""
    for file in sorted({o.place.file for o in profile.operations if o.place is not None}):
        try:
            source = SourceFile.read(Path(file))
        except (OSError, Unreadable):
            continue  # a profile of another machine
        program = ScriptProgram(source)
        for finding in [*_slices(program), *_entries(program)]:
            lines = _lines_of(program, source, finding.others[0].line)
            inside = [
                o
                for o in profile.operations
                if o.name.startswith("aten::") and o.place and o.place.file == file and o.place.line in lines
            ]
            share = sum(o.share for o in inside)
            if sum(o.calls for o in inside) >= MANY and share >= MUCH:
                evidence = f"{100 * share:.0f} % of the operators' time is spent in this loop"
                yield replace(finding, evidence=[evidence])


def _lines_of(program: ScriptProgram, source: SourceFile, start: int) -> set[int]:
    """Return the lines of the loop that starts there, and of the functions of this file that it calls."""
    found: set[int] = set()
    waiting = [node for node in source.nodes if isinstance(node, ast.For) and node.lineno == start]
    seen: list[ast.AST] = []
    while waiting:
        node = waiting.pop()
        if any(node is each for each in seen):
            continue
        seen.append(node)
        found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        waiting += [
            function  # type: ignore[misc]
            for call in ast.walk(node)
            if isinstance(call, ast.Call)
            for _, function in program.functions_called(source, call)
        ]
    return found


RULE = Rule(
    "FL118",
    "one_sample_at_a_time",
    Severity.TIME,
    __doc__,
    check_source,
    check_profile,
)
