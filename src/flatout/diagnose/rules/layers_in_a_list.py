"""Layers are kept in a plain list or dict.

What:
    A `torch.nn.Module` stores its layers in a Python list or dict, not in a `ModuleList`, `ModuleDict` or
    `Sequential`.
Why it matters:
    Modules in a list are not registered. `parameters()` omits them, so they are never trained. `to(device)`
    leaves them on the CPU, `state_dict()` does not save them, and `eval()` does not affect them.
How to fix it:
    Use `torch.nn.ModuleList([...])` or `torch.nn.ModuleDict({...})`.
Example:
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
  -         self.layers = [torch.nn.Linear(4, 4) for _ in range(3)]  # <-
  +         self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.ModuleList.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

TRAINED = {
    "Linear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "LayerNorm",
    "GroupNorm",
    "InstanceNorm2d",
    "RMSNorm",
    "Embedding",
    "EmbeddingBag",
    "LSTM",
    "GRU",
    "RNN",
    "LSTMCell",
    "GRUCell",
    "RNNCell",
    "MultiheadAttention",
    "Bilinear",
    "PReLU",
    "TransformerEncoderLayer",
    "TransformerDecoderLayer",
    "Transformer",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, klass in program.modules_defined():
        for name, statements in program.values.attributes(source, klass).items():
            for statement in statements:
                if (
                    statement.value is None
                    or source.klass(statement) is not klass
                    or not isinstance(source.parent(statement), ast.FunctionDef)
                ):
                    continue
                if any(
                    isinstance(target, (ast.Tuple, ast.List)) for target in getattr(statement, "targets", ())
                ):
                    continue  # self.a, self.b = Linear(...), Linear(...): two separate attributes
                filled = isinstance(statement.value, (ast.List, ast.Dict)) and not _entries(statement.value)
                holds = any(has_parameters(program, source, each) for each in _entries(statement.value)) or (
                    filled and _appended(program, source, klass, name)
                )
                if holds and not _registered(klass, statement, name):
                    right = (
                        "ModuleDict"
                        if isinstance(statement.value, (ast.Dict, ast.DictComp))
                        else "ModuleList"
                    )
                    yield RULE.finding(
                        f"the layers in `self.{name}` are not registered: they are not trained, moved or saved with the module",
                        source.place(statement),
                        f"self.{name} = torch.nn.{right}({source.code(statement.value)})",
                    )


def _entries(value: ast.AST) -> list[ast.expr]:
    if isinstance(value, (ast.List, ast.Tuple)):
        return value.elts
    if isinstance(value, ast.ListComp):
        return [value.elt]
    if isinstance(value, ast.Dict):
        return value.values
    if isinstance(value, ast.DictComp):
        return [value.value]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        return _entries(value.left)
    return []


def has_parameters(program: ScriptProgram, source: SourceFile, node: ast.AST) -> bool:
    """Return whether an expression creates a module with parameters, of torch or of the program."""
    if not isinstance(node, ast.Call):
        return False
    dotted = source.dotted(node.func)
    if dotted == "torch.nn.Sequential":
        return any(has_parameters(program, source, each) for each in node.args)
    if dotted.startswith("torch.nn."):
        return dotted.rpartition(".")[2] in TRAINED
    return any(
        home is each and klass is own
        for home, klass in program.class_named(source, node.func)
        for each, own in program.modules_defined()
    ) and any(
        has_parameters(program, home, call)
        for home, klass in program.class_named(source, node.func)
        for call in ast.walk(klass)
        if (isinstance(call, ast.Call) and source.klass(call) is klass)
        or (isinstance(call, ast.Call) and home is not source)
    )


def _appended(program: ScriptProgram, source: SourceFile, klass: ast.ClassDef, name: str) -> bool:
    for node in ast.walk(klass):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
            and node.args
            and isinstance(node.func.value, ast.Attribute)
            and node.func.value.attr == name
            and has_parameters(program, source, node.args[0])
        ):
            return True
    return False


def _registered(klass: ast.ClassDef, statement: ast.AST, name: str) -> bool:
    """Return whether the class passes the list to a call that may register its modules."""
    for node in ast.walk(klass):
        if isinstance(node, ast.Call):
            called = (
                node.func.attr
                if isinstance(node.func, ast.Attribute)
                else node.func.id
                if isinstance(node.func, ast.Name)
                else ""
            )
            handed = [*node.args, *(k.value for k in node.keywords)]
            named = any(
                isinstance(each, ast.Attribute) and each.attr == name
                for argument in handed
                for each in ast.walk(argument)
            )
            if called in ("add_module", "register_module", "setattr") or (
                named and called in ("ModuleList", "ModuleDict", "Sequential", "extend", "tuple")
            ):
                return True
    return False


RULE = Rule("FL021", "layers_in_a_list", Severity.WRONG, __doc__, check)
