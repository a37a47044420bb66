"""Every rank writes the same file.

What:
    The program is distributed, and `torch.save` runs in every process, without a condition on the rank.
Why it matters:
    All ranks write to one path at the same time. The file can be mixed or truncated, which shows only when it
    is loaded. On a shared disk, saving also takes N times as long.
How to fix it:
    Put it under `if torch.distributed.get_rank() == 0:`.
Example:
    import torch

    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
  - torch.save(model.module.state_dict(), "model.pt")  # <-
  + if torch.distributed.get_rank() == 0:
  +     torch.save(model.module.state_dict(), "model.pt")
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    wraps = {id(call) for _, call in program.calls("torch.nn.parallel.DistributedDataParallel")}
    distributed = {event.root for event in program.events if id(event.node) in wraps}
    for event in program.events if distributed else ():
        if event.root not in distributed:
            continue
        if (
            event.kind == "call"
            and isinstance(event.node, ast.Call)
            and len(event.node.args) == 2
            and event.source.dotted(event.node.func) == "torch.save"
        ):
            path = ast.unparse(event.node.args[1]).lower()
            if not event.arms and "rank" not in path and not _leaves_early(event):
                yield RULE.finding(
                    "every process writes this file at the same time",
                    event.place,
                    f"if torch.distributed.get_rank() == 0:\n    {event.source.code(event.node)}",
                )


def _leaves_early(event: ProgramEvent) -> bool:
    """Return whether a calling function may return early, or its name or decorators mention a rank."""
    for frame in event.frames:
        if not isinstance(frame, FUNCTIONS):
            continue
        shown = " ".join([frame.name, *(ast.unparse(each) for each in frame.decorator_list)]).lower()
        returns = any(
            isinstance(each, ast.If) and any(isinstance(inner, ast.Return) for inner in each.body)
            for each in frame.body
        )
        if returns or "rank" in shown or ("main" in shown and "master" in shown):
            return True
    return any(
        "rank" in ast.unparse(block).lower() or "main_process" in ast.unparse(block)
        for _, block in event.blocks
    )


RULE = Rule("FL313", "saved_by_every_rank", Severity.FRAGILE, __doc__, check)
