"""A context manager is created but not entered.

What:
    `torch.no_grad()`, `torch.inference_mode()` or `torch.autocast(...)` is alone on a line, without `with`.
Why it matters:
    The call creates an object that takes effect only when it is entered. On its own it has no effect: the
    evaluation builds graphs, and the forward pass runs in full precision.
How to fix it:
    Write `with torch.no_grad():` and indent the block below it. (`torch.set_grad_enabled(False)` takes effect
    without `with`.)
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    model.eval()
  - torch.no_grad()  # <-
  - print(model(torch.randn(8, 4)))
  + with torch.no_grad():
  +     print(model(torch.randn(8, 4)))
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity

CONTEXTS = {
    "torch.no_grad",
    "torch.inference_mode",
    "torch.enable_grad",
    "torch.autocast",
    "torch.amp.autocast",
    "torch.cuda.amp.autocast",
    "torch.autograd.no_grad",
    "torch.profiler.record_function",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.Expr):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and source.dotted(node.value.func) in CONTEXTS
        ):
            yield RULE.finding(
                f"`{source.code(node.value)}` has no effect on its own: use it in a `with` statement",
                source.place(node),
                f"with {source.code(node.value)}:",
            )


RULE = Rule("FL029", "context_thrown_away", Severity.WRONG, __doc__, check, weight=-1)
