"""A loss that expects logits receives probabilities.

What:
    The output of a softmax goes into `cross_entropy` (or `CrossEntropyLoss`), or the output of a sigmoid into
    a loss "with logits".
Why it matters:
    These losses apply the softmax or the sigmoid themselves. Applied twice, the largest probability that 10
    classes can reach is 0.23 instead of 1. The loss cannot fall below 1.46, and gradients are small
    everywhere. The model trains slowly and ends with a worse result.
How to fix it:
    Pass the output of the last linear layer to the loss. Apply the softmax only where you need probabilities.
Example:
    import torch
  - import torch.nn.functional as F

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 10)

        def forward(self, x):
  -         return F.softmax(self.fc(x), dim=1)
  +         return self.fc(x)

    model = Net()
    criterion = torch.nn.CrossEntropyLoss()
    loss = criterion(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long))  # <-
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import argument, returns
from flatout.probe.windows import last_name
from flatout.schema.findings import Finding, Severity

TWICE = {
    "CrossEntropyLoss": "softmax",
    "cross_entropy": "softmax",
    "BCEWithLogitsLoss": "sigmoid",
    "binary_cross_entropy_with_logits": "sigmoid",
    "MultiLabelSoftMarginLoss": "sigmoid",
}
METHODS = {"softmax", "sigmoid", "log_softmax"}  # of a tensor, whatever is known of it
SHAPES = {
    "view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "flatten",
    "contiguous",
    "float",
    "permute",
    "transpose",
    "to",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call, name in losses(program, TWICE):
        made = ends_in(program, source, call.args[0]) if call.args else {""}
        if made == {TWICE[name]}:
            yield RULE.finding(
                f"`{source.code(call.args[0])}` is the output of a {TWICE[name]}, and {name} applies it again",
                source.place(call),
                f"# pass {name} the output of the last linear layer, without the {TWICE[name]}",
            )


def losses(program: ScriptProgram, wanted: dict[str, str]) -> Iterator[tuple[SourceFile, ast.Call, str]]:
    """Yield every call of one of these losses, as a function or a module, with its name."""
    for source in program.sources:
        for call in source.calls:
            dotted = source.dotted(call.func)
            name = dotted.rpartition(".")[2]
            if dotted.startswith("torch.") and name in wanted and name.islower():
                yield source, call, name
            elif not dotted:
                kinds = program.values.kinds(source, call.func) & wanted.keys()
                if len(kinds) == 1 and "Module" in program.values.kinds(source, call.func):
                    yield source, call, next(iter(kinds))
                    continue
                passed = [
                    origin.source.dotted(_partial(origin.source, origin.node))
                    for origin in program.origins(source, call.func)
                    if origin.node is not call.func and not origin.part
                ]
                names = {
                    name.rpartition(".")[2] for name in passed if name.startswith("torch.")
                } & wanted.keys()
                if len(names) == 1:
                    yield source, call, next(iter(names))


def _partial(source: SourceFile, node: ast.AST) -> ast.AST:
    """Return the function in ``functools.partial(function, ...)``, or the node."""
    partial = isinstance(node, ast.Call) and source.dotted(node.func) == "functools.partial" and node.args
    return node.args[0] if partial else node  # type: ignore[attr-defined]


def ends_in(program: ScriptProgram, source: SourceFile, node: ast.AST, depth: int = 0) -> set[str]:
    """Return the names of the last functions that made a tensor (softmax, Linear, ...).

    The search follows the program's own modules. "" stands for an unknown function.
    """
    if depth > 6:
        return {""}
    if isinstance(node, ast.Subscript):
        return ends_in(program, source, node.value, depth + 1)
    item = _iterable_of(source, node)
    if item is not None:
        return ends_in(program, source, item, depth + 1)
    found: set[str] = set()
    for origin in program.origins(source, node):
        call = origin.node
        if isinstance(call, ast.arg) and not origin.part:
            found |= _passed(program, origin.source, call, depth)
            continue
        if isinstance(call, ast.Subscript) and call is not node:
            found |= ends_in(program, origin.source, call, depth + 1)
            continue
        if not isinstance(call, ast.Call) or origin.part:
            return {""}
        dotted = origin.dotted
        if dotted.startswith("torch."):
            found.add(dotted.rpartition(".")[2])
            continue
        if isinstance(call.func, ast.Attribute) and program.values.is_a(
            origin.source, call.func.value, "Tensor"
        ):
            found |= (
                ends_in(program, origin.source, call.func.value, depth + 1)
                if call.func.attr in SHAPES
                else {call.func.attr}
            )
            continue
        if isinstance(call.func, ast.Attribute) and call.func.attr in METHODS:
            known = program.functions_called(origin.source, call)
            found |= {""} if known else {call.func.attr}
            continue
        found |= _of_module(program, origin.source, call.func, depth)
    return {
        name.lower() if name.lower() in ("softmax", "sigmoid", "logsoftmax") else name for name in found
    } or {""}


def _iterable_of(source: SourceFile, node: ast.AST) -> ast.expr | None:
    """Return the tensor whose rows a name stands for: ``rows`` in ``for i, (row, y) in enumerate(zip(rows, ys))``."""
    bindings = source.names.reaching(node) if isinstance(node, ast.Name) else []
    if len(bindings) != 1 or bindings[0].how != "for" or bindings[0].value is None:
        return None
    over, path = bindings[0].value, bindings[0].path
    while isinstance(over, ast.Call) and over.args:
        name = last_name(over.func)
        if name == "enumerate" and path[:1] == (1,):
            over, path = over.args[0], path[1:]
        elif name == "zip" and path and path[0] < len(over.args):
            over, path = over.args[path[0]], path[1:]
        else:
            break
    return None if path else over


def _passed(program: ScriptProgram, source: SourceFile, parameter: ast.arg, depth: int) -> set[str]:
    """Return what made the argument that all calls of a module of the program pass to its ``forward``."""
    forward = source.parent(source.parent(parameter) or source.tree)
    klass = source.parent(forward) if forward is not None else None
    if (
        not isinstance(forward, ast.FunctionDef)
        or forward.name != "forward"
        or not isinstance(klass, ast.ClassDef)
    ):
        return {""}
    found: set[str] = set()
    for caller in program.sources:
        for call in caller.calls:
            if caller.dotted(call.func) or klass not in [
                each for _, each in program.values.classes_of(caller, call.func)
            ]:
                continue
            given = argument(source, forward, parameter, call)
            found |= ends_in(program, caller, given, depth + 1) if given is not None else {""}
    return found or {""}


def _of_module(program: ScriptProgram, source: SourceFile, model: ast.AST, depth: int) -> set[str]:
    found: set[str] = set()
    for origin in program.origins(source, model):
        made = origin.node
        if not isinstance(made, ast.Call) or origin.part:
            return {""}
        dotted = origin.dotted
        last = dotted.rpartition(".")[2]
        if (
            dotted == "torch.nn.Sequential"
            and made.args
            and not any(isinstance(a, ast.Starred) for a in made.args)
        ):
            found |= _of_module(program, origin.source, made.args[-1], depth + 1) if depth < 6 else {""}
        elif dotted.startswith("torch.nn.") and last not in (
            "Sequential",
            "DataParallel",
            "DistributedDataParallel",
        ):
            found.add(last)
        else:
            forwards = [
                (home, method)
                for home, klass in program.class_named(origin.source, made.func)
                for method in klass.body
                if isinstance(method, ast.FunctionDef) and method.name == "forward"
            ]
            for home, method in forwards:
                for value in returns(method):
                    found |= ends_in(program, home, value, depth + 1)
            if not forwards:
                return {""}
    return found or {""}


RULE = Rule("FL017", "softmax_before_cross_entropy", Severity.WRONG, __doc__, check)
