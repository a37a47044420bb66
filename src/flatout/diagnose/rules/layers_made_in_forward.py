"""A layer with parameters is created in forward.

What:
    `forward` creates a layer (`torch.nn.Linear(...)(x)`) or a `torch.nn.Parameter`.
Why it matters:
    Every step creates a new layer with new random weights, on the CPU. The optimizer does not know it, so it
    is never trained.
How to fix it:
    Create it in `__init__` and use it in `forward`.
Example:
    import torch

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(4, 8)
  +         self.second = torch.nn.Linear(8, 1)

        def forward(self, x):
  -         return torch.nn.Linear(8, 1)(self.first(x))  # <-
  +         return self.second(self.first(x))
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.layers_in_a_list import TRAINED
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, klass in program.modules_defined():
        forward = next(
            (m for m in klass.body if isinstance(m, ast.FunctionDef) and m.name == "forward"), None
        )
        for call in (node for node in ast.walk(forward or ast.Module([], [])) if isinstance(node, ast.Call)):
            dotted = source.dotted(call.func)
            last = dotted.rpartition(".")[2]
            if not dotted.startswith("torch.nn.") or last not in TRAINED | {"Parameter"}:
                continue
            lazily = any(isinstance(each, ast.If) for each in source.parents(call)) and isinstance(
                source.parent(call), ast.Assign
            )
            if not lazily:
                yield RULE.finding(
                    f"this {last} is created in every forward pass: it is random each time and never trained",
                    source.place(call),
                    f"self.{last.lower()} = {source.code(call)}  # in __init__",
                )


RULE = Rule("FL022", "layers_made_in_forward", Severity.WRONG, __doc__, check)
