"""A tensor is created on the CPU and then moved.

What:
    `torch.zeros(...).to(device)`, `torch.tensor(array).cuda()` or similar is in the training loop, in
    `forward`, or in a function that only converts its argument.
Why it matters:
    The host fills the tensor, then waits while it is copied over the bus from pageable memory. The device can
    create the tensor itself in microseconds, without a wait.
How to fix it:
    Use `torch.zeros(..., device=device)`. Random tensors then have other values: each device has its own
    generator.
Example:
    import torch

    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
  -     x = torch.randn(8, 4).cuda()  # <-
  -     target = torch.zeros(8, 1).cuda()  # <-
  +     x = torch.randn(8, 4, device="cuda")
  +     target = torch.zeros(8, 1, device="cuda")
        optimizer.zero_grad()
        (model(x) - target).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#create-tensors-directly-on-the-target-device
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import add_argument, remove_call
from flatout.diagnose.rule import Rule
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import returns
from flatout.schema.findings import Edit, Finding, Severity

MAKERS = {
    "zeros",
    "ones",
    "empty",
    "full",
    "rand",
    "randn",
    "randint",
    "arange",
    "linspace",
    "eye",
    "randperm",
    "normal",
    "tensor",
    "as_tensor",
}

SAME = {"zeros", "ones", "empty", "full", "eye"}  # these values are the same on every device


def check(program: ScriptProgram) -> Iterator[Finding]:
    seen = set()
    for source, call, library in _often(program):
        if (
            id(call) in seen
            or not isinstance(call.func, ast.Attribute)
            or call.func.attr not in ("to", "cuda")
        ):
            continue
        seen.add(id(call))
        made = call.func.value
        if (
            not isinstance(made, ast.Call)
            or not source.dotted(made.func).startswith("torch.")
            or source.dotted(made.func).rpartition(".")[2] not in MAKERS
        ):
            continue
        where = _device(source, call)
        if where and not any(keyword.arg in ("device", None) for keyword in made.keywords):
            function = source.function(call)
            yield RULE.finding(
                f"`{source.code(made)}` is created on the CPU and then copied, in every "
                + (f"call of `{function.name}`" if library and function is not None else "step"),
                source.place(call),
                f"{source.code(made)[:-1]}{', ' if made.args or made.keywords else ''}device={where})",
                edits=_edits(source, call, made, where),
            )


def _often(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.Call, bool]]:
    """Yield the calls of every step: in training loops and in forward. And those of converting functions.

    The last entry is true for a converting function."""
    for loop in program.steps:
        for event in loop.events:
            if isinstance(event.node, ast.Call) and (loop.steady(event) or not _from_values(event.node)):
                yield event.source, event.node, False
    for source, klass in program.modules_defined():
        for method in klass.body:
            if isinstance(method, ast.FunctionDef) and method.name == "forward":
                yield from ((source, node, False) for node in ast.walk(method) if isinstance(node, ast.Call))
    for source in program.sources:
        for function in source.functions:
            if function.name != "__init__" and not program.callers(function):
                yield from ((source, call, True) for call in _converts(function))


def _from_values(call: ast.Call) -> bool:
    """Return whether a call moves ``torch.tensor(values)``. One that runs rarely, for a log, is harmless."""
    made = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = getattr(made.func, "attr", "") if isinstance(made, ast.Call) else ""
    return name in ("tensor", "as_tensor")


def _converts(function: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls whose result a function returns, if it is made from one of its parameters.

    ``return torch.as_tensor(array).to(device)`` is the helper of a library, made to be called in each step.
    """
    assert isinstance(function, FUNCTIONS)
    given = {a.arg for a in [*function.args.posonlyargs, *function.args.args]}
    for value in returns(function):
        if isinstance(value, ast.DictComp):
            given |= {each.id for each in ast.walk(value.generators[0].target) if isinstance(each, ast.Name)}
            value = value.value
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            made = value.func.value
            first = made.args[0] if isinstance(made, ast.Call) and made.args else None
            if isinstance(first, ast.Name) and first.id in given:
                yield value


def _device(source: SourceFile, call: ast.Call) -> str:
    """Return the device as code if the call names only a device."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return source.code(call.args[0]) if call.args else '"cuda"'
    given = (
        call.args[0]
        if len(call.args) == 1
        else next((k.value for k in call.keywords if k.arg == "device"), None)
    )
    if (
        given is None
        or source.dotted(given).startswith("torch.")
        or (isinstance(given, ast.Constant) and given.value == "cpu")
    ):
        return ""
    shown = source.code(given)
    return (
        shown
        if isinstance(given, ast.Constant)
        or "device" in shown
        or "cuda" in shown
        or shown.endswith(("gpu", "rank"))
        else ""
    )


def _edits(source: SourceFile, moved: ast.Call, made: ast.Call, where: str) -> list[Edit]:
    """Return the edits if they keep every value: random numbers of another device are other numbers."""
    assert isinstance(moved.func, ast.Attribute)
    name = source.dotted(made.func).rpartition(".")[2]
    given = [*moved.args, *(keyword.value for keyword in moved.keywords)]
    if (
        name not in SAME
        or len(given) > 1
        or {k.arg for k in made.keywords} & {"out", "pin_memory", "requires_grad"}
    ):
        return []
    if moved.func.attr == "cuda" and given and not isinstance(given[0], ast.Constant):
        return []  # None means the current device there, and the CPU in `device=None`
    argument = add_argument(source, made, f"device={where}")
    return [*argument, *remove_call(source, moved)] if argument else []


RULE = Rule("FL111", "made_on_host_then_moved", Severity.TIME, __doc__, check, fix_changes="")
