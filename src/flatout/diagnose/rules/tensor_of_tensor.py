"""torch.tensor of a tensor.

What:
    `torch.tensor(x)` is given something that is a tensor already.
Why it matters:
    It copies the values and cuts them off from their graph: a gradient that was meant to flow through it does not. PyTorch warns of it,
    once.
How to mend it:
    `x.detach().clone()` where a copy is wanted, `x` itself where the gradient is.
Bad:
    import torch

    x = torch.randn(8, 4)
    y = torch.tensor(x)  # <-
Good:
    import torch

    x = torch.randn(8, 4)
    y = x.detach().clone()
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.tensor.html
"""

from __future__ import annotations

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.plan.findings import Finding, Severity
from flatout.probe.program import Program


def look(program: Program) -> Iterator[Finding]:
    for source, call in program.calls("torch.tensor"):
        if call.args and program.values.kinds(source, call.args[0]) == {"Tensor"}:
            name = source.code(call.args[0])
            yield RULE.finding(f"`{name}` is a tensor already: this copies it and cuts it off from its graph", source.place(call), f"{name}.detach().clone()")


RULE = Rule("FL311", "tensor_of_tensor", Severity.FRAGILE, __doc__, look=look)
