"""A profiler with a schedule never gets step() calls.

What:
    `torch.profiler.profile(schedule=...)` is used, but `prof.step()` is never called, or only after the loop.
Why it matters:
    The schedule counts calls of `step()`. Without them, the profiler stays in its first phase. With `wait=1`,
    it records nothing and writes no trace. Without a wait phase, it records the whole run as one step and
    fills the memory.
How to fix it:
    Call `prof.step()` at the end of every pass of the loop.
Example:
    import torch
    from torch.profiler import profile, schedule

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile(schedule=schedule(wait=1, warmup=1, active=3)) as prof:  # <-
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
  +         prof.step()
Sources:
    https://docs.pytorch.org/docs/stable/profiler.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    steps = [event for event in program.events if event.kind == "profiler_step"]
    for source, call in program.calls("torch.profiler.profile"):
        plan = next((keyword.value for keyword in call.keywords if keyword.arg == "schedule"), None)
        if (
            plan is None
            or isinstance(plan, ast.Constant)
            or any(keyword.arg is None for keyword in call.keywords)
        ):
            continue
        name = _name(source, call)
        if any(event.loops for event in steps) or not name or _handed_on(program, source, name):
            continue
        where = (
            f"`{name}.step()` runs only outside the loop, on line {steps[0].place.line}"
            if steps
            else f"`{name}.step()` is never called"
        )
        yield RULE.finding(
            f"{where}: the schedule of this profiler never advances",
            source.place(call),
            f"{name}.step()  # at the end of the loop body",
            others=[event.place for event in steps],
        )


def _name(source: SourceFile, call: ast.Call) -> str:
    """Return the name of the profiler."""
    holder = source.parent(call)
    target = (
        holder.optional_vars
        if isinstance(holder, ast.withitem)
        else holder.targets[0]
        if isinstance(holder, ast.Assign)
        else None
    )
    return target.id if isinstance(target, ast.Name) else ""


def _handed_on(program: ScriptProgram, source: SourceFile, name: str) -> bool:
    """Return whether the profiler is passed to a function without visible source."""
    for call in source.calls:
        handed = [*call.args, *(keyword.value for keyword in call.keywords)]
        if any(
            isinstance(each, ast.Name) and each.id == name for each in handed
        ) and not program.functions_called(source, call):
            return True
    return False


RULE = Rule("FL025", "profiler_step_missing", Severity.WRONG, __doc__, check)
