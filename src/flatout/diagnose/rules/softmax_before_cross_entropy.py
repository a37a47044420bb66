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
Bad:
    import torch
    import torch.nn.functional as F

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 10)

        def forward(self, x):
            return F.softmax(self.fc(x), dim=1)

    model = Net()
    criterion = torch.nn.CrossEntropyLoss()
    loss = criterion(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long))  # <-
Good:
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(4, 10)

        def forward(self, x):
            return self.fc(x)

    model = Net()
    criterion = torch.nn.CrossEntropyLoss()
    loss = criterion(model(torch.randn(8, 4)), torch.zeros(8, dtype=torch.long))
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import returns
from flatout.schema.findings import Finding, Severity

TWICE = {
    "CrossEntropyLoss": "softmax",
    "cross_entropy": "softmax",
    "BCEWithLogitsLoss": "sigmoid",
    "binary_cross_entropy_with_logits": "sigmoid",
    "MultiLabelSoftMarginLoss": "sigmoid",
}
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


def look(program: ScriptProgram) -> Iterator[Finding]:
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


def ends_in(program: ScriptProgram, source: SourceFile, node: ast.AST, depth: int = 0) -> set[str]:
    """Return the names of the last functions that made a tensor (softmax, Linear, ...).

    The search follows the program's own modules. "" stands for an unknown function.
    """
    if depth > 6:
        return {""}
    found: set[str] = set()
    for origin in program.origins(source, node):
        call = origin.node
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
        found |= _of_module(program, origin.source, call.func, depth)
    return {
        name.lower() if name.lower() in ("softmax", "sigmoid", "logsoftmax") else name for name in found
    } or {""}


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


RULE = Rule("FL017", "softmax_before_cross_entropy", Severity.WRONG, __doc__, look=look)
