"""A method is named but not called.

What:
    A line contains `optimizer.step`, `model.eval`, `optimizer.zero_grad` or similar, without parentheses.
Why it matters:
    Python looks up the method and discards it. There is no error and no effect: no step, no evaluation mode,
    no cleared gradients.
How to fix it:
    Add the parentheses.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  - model.eval  # <-
  + model.eval()
    print(model(torch.randn(8, 4)))
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

METHODS = {
    "step",
    "zero_grad",
    "backward",
    "eval",
    "train",
    "update",
    "cuda",
    "cpu",
    "half",
    "double",
    "float",
    "empty_cache",
    "synchronize",
    "detach_",
    "barrier",
    "requires_grad_",
    "init_process_group",
    "destroy_process_group",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.Expr):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Attribute)
            and node.value.attr in METHODS
            and not source.cells
        ):
            yield RULE.finding(
                f"`{source.code(node.value)}` is named here but not called: the line has no effect",
                source.place(node),
                f"{source.code(node.value)}()",
            )


RULE = Rule(
    "FL028",
    "call_without_parentheses",
    Severity.WRONG,
    __doc__,
    check,
    weight=-1,
)
