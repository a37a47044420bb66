"""Deterministic algorithms fill every new tensor.

What:
    `torch.use_deterministic_algorithms(True)` is set, and `torch.utils.deterministic.fill_uninitialized_memory`
    has its default, which is true.
Why it matters:
    `torch.empty` and all operators that use it then write NaN into new memory, which the next operator
    overwrites. A step has hundreds of these calls, each a kernel of its own on a GPU. Only code that reads
    memory before writing it needs this.
How to fix it:
    Set `torch.utils.deterministic.fill_uninitialized_memory = False` next to it. Algorithms stay
    deterministic.
Example:
    import torch

    torch.use_deterministic_algorithms(True)  # <-
  + torch.utils.deterministic.fill_uninitialized_memory = False
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/deterministic.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import add_statement_after
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Edit, Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions("fill_uninitialized_memory"):
        return
    for source, call in program.calls("torch.use_deterministic_algorithms"):
        mode = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "mode"), None)
        if isinstance(mode, ast.Constant) and mode.value is True:
            yield RULE.finding(
                "this also fills the memory of every new tensor, which costs a kernel for each on a GPU",
                source.place(call),
                "torch.utils.deterministic.fill_uninitialized_memory = False",
                edits=_edits(source, call),
            )


def _edits(source: SourceFile, call: ast.Call) -> list[Edit]:
    """Return the edit if the call shows a name of torch itself."""
    if not isinstance(call.func, ast.Attribute) or source.dotted(call.func.value) != "torch":
        return []
    name = f"{source.code(call.func.value)}.utils.deterministic.fill_uninitialized_memory"
    return add_statement_after(source, call, f"{name} = False")


RULE = Rule(
    "FL120",
    "memory_filled_for_nothing",
    Severity.TIME,
    __doc__,
    check,
    fix_changes="",
    weight=-1,
)
