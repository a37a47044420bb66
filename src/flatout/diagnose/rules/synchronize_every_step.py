"""Every step synchronises with the device.

What:
    `torch.cuda.synchronize()` runs in every step of the training loop, or in every batch of an evaluation.
Why it matters:
    The host stops until the device has finished all work. The device then has nothing queued, and idles while
    the host prepares the next step. Work that should overlap runs sequentially.
How to fix it:
    Remove it. To time a part of the step, use `torch.cuda.Event(enable_timing=True)`, or measure every
    hundredth step.
Example:
    import torch

    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4, device="cuda")).square().mean().backward()
        optimizer.step()
  -     torch.cuda.synchronize()  # <-
  + torch.cuda.synchronize()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import remove_statement
from flatout.diagnose.rule import Rule
from flatout.probe.evaluation_loops import over_batches
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent
from flatout.schema.findings import Finding, Severity

NAMES = (
    "torch.cuda.synchronize",
    "torch.accelerator.synchronize",
    "torch.cuda.current_stream().synchronize",
    "torch.mps.synchronize",
    "torch.xpu.synchronize",
)


def check(program: ScriptProgram) -> Iterator[Finding]:
    found = list(every_step(program, *NAMES))
    for event, when, weight in found:
        pair = [other for other, _, each in found if each == weight and other.loops == event.loops]
        if weight and len(pair) > 1 and _needed(program, event):
            continue  # both ends of a time that is measured on purpose
        yield RULE.finding(
            f"`{event.source.code(event.node)}` makes the host wait for the device in every {when}",
            event.place,
            f"# remove {event.source.code(event.node)}, or time every hundredth step",
            edits=[] if _needed(program, event) else remove_statement(event.source, event.node),
            weight=weight,
        )


def _needed(program: ScriptProgram, event: ProgramEvent) -> bool:
    """Return whether something may rely on the wait: a clock, an event, another stream, a copy to the host."""
    if program.mentions("elapsed_time", "Stream", "stream", "current_stream", "CUDAGraph", "copy_"):
        return True
    source = event.source
    places = [(source, event.node), *((loop.source, loop.node) for loop in event.loops)]
    around = [(home, home.function(node) or home.tree) for home, node in places]
    clock = any(
        home.dotted(node.func).startswith(("time.", "timeit."))
        for home, scope in around
        for node in ast.walk(scope)
        if isinstance(node, ast.Call)
    )
    calls = [node for node in ast.walk(around[0][1]) if isinstance(node, ast.Call)]
    to_host = any(
        isinstance(call.func, ast.Attribute)
        and (call.func.attr == "cpu" or "'cpu'" in source.code(call))
        and any(keyword.arg == "non_blocking" for keyword in call.keywords)
        for call in calls
    )
    return clock or to_host


def every_step(program: ScriptProgram, *dotted: str) -> Iterator[tuple[ProgramEvent, str, int]]:
    """Yield the calls of one of these names that run in every pass of a training loop, or of an evaluation.

    With each come the words for when it runs, and the weight of its finding.
    """
    seen: set[int] = set()
    loops = [(loop, "step", 0) for loop in program.steps]
    loops += [
        (loop, "batch of the evaluation", -1) for loop in program.evaluation_loops if over_batches(loop)
    ]
    for loop, when, weight in loops:
        for event in loop.of("call"):
            if (
                loop.always(event)
                and isinstance(event.node, ast.Call)
                and event.source.dotted(event.node.func) in dotted
                and not (weight and id(event.node) in seen)
            ):
                seen.add(id(event.node))
                yield event, when, weight


RULE = Rule("FL103", "synchronize_every_step", Severity.TIME, __doc__, check, fix_changes="")
