"""The result of a tensor method is discarded.

What:
    A line calls a method that returns a new tensor (`x.to(device)`, `x.detach()`, `x.clamp(0, 1)`) and does
    not use the result.
Why it matters:
    Only modules move in place. The tensor does not change: it stays on the wrong device, attached to its
    graph, or unclamped.
How to fix it:
    Write `x = x.to(device)`, or use the in-place method with an underscore: `x.clamp_(0, 1)`.
Example:
    import torch

    x = torch.randn(8, 4)
  - x.clamp(0, 1)  # <-
  + x = x.clamp(0, 1)
    print(x)
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import wrap
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

PURE = {
    "to",
    "cuda",
    "cpu",
    "detach",
    "clamp",
    "clip",
    "float",
    "half",
    "double",
    "long",
    "int",
    "bool",
    "view",
    "reshape",
    "permute",
    "transpose",
    "squeeze",
    "unsqueeze",
    "contiguous",
    "div",
    "mul",
    "add",
    "sub",
    "neg",
    "abs",
    "sqrt",
    "exp",
    "log",
    "pow",
    "flatten",
    "expand",
    "type",
    "clone",
    "round",
    "masked_fill",
    "index_fill",
    "scatter",
    "normal",
    "sum",
    "mean",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.Expr):
        call = node.value if isinstance(node, ast.Expr) else None
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Attribute)
            or call.func.attr not in PURE
            or source.dotted(call.func)
        ):
            continue
        owner = call.func.value  # in a notebook, such a line displays its value
        if (
            not source.cells
            and program.values.kinds(source, owner) == {"Tensor"}
            and isinstance(owner, (ast.Name, ast.Attribute))
        ):
            yield RULE.finding(
                f"`{source.code(call)}` returns a new tensor, which is discarded; `{source.code(owner)}` does not change",
                source.place(node),
                f"{source.code(owner)} = {source.code(call)}",
                edits=wrap(source, call, f"{source.code(owner)} = ", ""),
            )


RULE = Rule(
    "FL030",
    "result_thrown_away",
    Severity.WRONG,
    __doc__,
    check,
    fix_changes="the name is the new tensor from here on",
    weight=-1,
)
