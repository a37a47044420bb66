"""forward is called directly.

What:
    The program calls `model.forward(x)` instead of `model(x)`.
Why it matters:
    Hooks do not run, and everything built on hooks is silently skipped. DistributedDataParallel does not
    average gradients, `torch.compile` of a module does not compile, and FSDP does not gather its weights.
    Profilers and flatout see no forward pass.
How to fix it:
    Call the module: `model(x)`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  - y = model.forward(torch.randn(8, 4))  # <-
  + y = model(torch.randn(8, 4))
Sources:
    https://docs.pytorch.org/docs/stable/generated/torch.nn.Module.html#torch.nn.Module.forward
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import remove_attribute
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in program.method_calls("forward"):
        assert isinstance(call.func, ast.Attribute)
        owner = call.func.value
        itself = (isinstance(owner, ast.Name) and owner.id in ("self", "cls")) or (
            isinstance(owner, ast.Call) and source.code(owner.func) == "super"
        )
        if not itself and program.values.is_a(source, owner, "Module"):
            shown = ", ".join(source.code(each) for each in [*call.args, *call.keywords])
            yield RULE.finding(
                f"`{source.code(owner)}.forward` skips every hook of the module",
                source.place(call),
                f"{source.code(owner)}({shown})",
                edits=remove_attribute(source, call.func),
            )


RULE = Rule(
    "FL306",
    "forward_called",
    Severity.FRAGILE,
    __doc__,
    check,
    fix_changes="the hooks of the module run, if it has any",
)
