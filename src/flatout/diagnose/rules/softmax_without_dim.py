"""A softmax lacks its dimension.

What:
    `F.softmax(x)`, `F.log_softmax(x)`, `torch.nn.Softmax()` or `torch.nn.LogSoftmax()` is called without
    `dim`.
Why it matters:
    PyTorch then chooses by the number of dimensions: 0 for one or three, 1 for two and four. If the input
    gains a dimension, the probabilities run over another axis, without an error. PyTorch warns, and plans to
    remove the implicit choice.
How to fix it:
    Set `dim=1` for class scores of a batch, or `dim=-1` for the last dimension.
Example:
    import torch
    import torch.nn.functional as F

  - probabilities = F.softmax(torch.randn(8, 4))  # <-
  + probabilities = F.softmax(torch.randn(8, 4), dim=1)
Sources:
    torch/nn/functional.py, _get_softmax_dim
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.dimensions import dimensions
from flatout.diagnose.rewrites import add_argument
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Edit, Finding, Severity

FUNCTIONS = ("torch.nn.functional.softmax", "torch.nn.functional.log_softmax", "torch.nn.functional.softmin")
MODULES = ("torch.nn.Softmax", "torch.nn.LogSoftmax", "torch.nn.Softmin")


def check(program: ScriptProgram) -> Iterator[Finding]:
    for names, before in ((FUNCTIONS, 1), (MODULES, 0)):
        for source, call in program.calls(*names):
            if len(call.args) <= before and not any(
                keyword.arg in ("dim", None) for keyword in call.keywords
            ):
                comma = ", " if call.args else ""
                yield RULE.finding(
                    "PyTorch chooses `dim` by the number of dimensions: 0 for one or three, otherwise 1",
                    source.place(call),
                    f"{source.code(call)[:-1]}{comma}dim=-1)  # or dim=1",
                    edits=_edits(program, source, call) if before else [],
                )


def _edits(program: ScriptProgram, source: SourceFile, call: ast.Call) -> list[Edit]:
    """Return the edit to the `dim` that PyTorch chooses now, if the source shows the number of dimensions."""
    count = dimensions(program, source, call.args[0]) if len(call.args) == 1 else None
    if count is None:
        return []
    return add_argument(source, call, f"dim={0 if count in (1, 3) else 1}")


RULE = Rule("FL314", "softmax_without_dim", Severity.FRAGILE, __doc__, check, fix_changes="")
