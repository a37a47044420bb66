"""torch.tensor is called on a tensor.

What:
    `torch.tensor(x)` receives a value that is already a tensor.
Why it matters:
    It copies the values and detaches them from their graph. No gradient flows through the copy. PyTorch warns
    once.
How to fix it:
    Use `x.detach().clone()` for a copy, or `x` itself to keep the gradient.
Example:
    import torch

    x = torch.randn(8, 4)
  - y = torch.tensor(x)  # <-
  + y = x.detach().clone()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.tensor.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import replace
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in program.calls("torch.tensor"):
        if (
            call.args
            and program.values.kinds(source, call.args[0]) == {"Tensor"}
            and not _of_another_type(source, call)
        ):
            name = source.code(call.args[0])
            yield RULE.finding(
                f"`{name}` is already a tensor: this copies it and detaches it from its graph",
                source.place(call),
                f"{name}.detach().clone()",
                edits=replace(source, call, f"{name}.detach().clone()") if _is_copy(source, call) else [],
            )


def _of_another_type(source: SourceFile, call: ast.Call) -> bool:
    """Return whether a test around the call asks for the type of its argument."""
    name = source.code(call.args[0])
    tests = [each.test for each in source.parents(call) if isinstance(each, (ast.If, ast.IfExp))]
    return any(
        isinstance(node, ast.Call)
        and source.code(node.func).endswith(("isinstance", "is_tensor"))
        and name in map(source.code, node.args)
        for test in tests
        for node in ast.walk(test)
    )


def _is_copy(source: SourceFile, call: ast.Call) -> bool:
    """Return whether the call only copies a value that is certainly a tensor, and that a method may follow."""
    value = call.args[0]
    own = isinstance(value, (ast.Call, ast.Name)) and not any(
        b.how == "parameter" for b in source.bindings(value)
    )
    return own and len(call.args) == 1 and not call.keywords


RULE = Rule("FL311", "tensor_of_tensor", Severity.FRAGILE, __doc__, check, fix_changes="")
