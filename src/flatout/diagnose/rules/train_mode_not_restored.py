"""After the first evaluation, the model stays in evaluation mode.

What:
    `model.eval()` is called inside the training loop, or a loop around it, but `model.train()` is never
    called in that loop. If it is called only once per epoch, the passes after an evaluation inside the epoch are
    affected.
Why it matters:
    After the first evaluation, Dropout drops nothing and BatchNorm uses frozen statistics, while the weights
    keep changing. The model overfits or diverges, without an error.
How to fix it:
    Call `model.train()` at the start of every epoch, or directly after the evaluation.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - model.train()
    for epoch in range(10):
  +     model.train()
        for _ in range(100):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
        model.eval()  # <-
        with torch.no_grad():
            print(model(torch.randn(8, 4)).square().mean())
"""

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import event_of
from flatout.diagnose.rule import Rule
from flatout.probe.contexts import without_gradients
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

DIFFERENT = ("Dropout", "BatchNorm", "AlphaDropout", "SyncBatchNorm", "RReLU", "InstanceNorm")
ENDS = (ast.Break, ast.Return, ast.Raise)


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        if loop.of("train"):
            continue
        restored = [event for event in loop.around if event.kind == "train"]
        for event in [*([] if restored else loop.around), *loop.events]:
            if (
                event.kind == "eval"
                and event.subject is not None
                and _is_trained(program, event, loop.events)
                and not (event in loop.events and _ends_the_loop(loop, event))
            ):
                name = event.source.code(event.subject)
                yield RULE.finding(
                    f"`{name}` stays in evaluation mode until line {restored[0].place.line} runs again, in the next epoch"
                    if restored
                    else f"`{name}` is set to evaluation mode in every pass of this loop, but never back to training mode",
                    event.place,
                    f"{name}.train()  # after the evaluation"
                    if restored
                    else f"{name}.train()  # at the start of the pass",
                    others=[loop.source.place(loop.loop.node)],
                )


def _ends_the_loop(loop: StepLoop, event: ProgramEvent) -> bool:
    """Return whether no further pass follows the event: the arm around it ends with ``break`` or ``return``."""
    function = loop.source.function(loop.loop.node)
    return any(
        isinstance(statement, ENDS if source.function(node) is function else ast.Raise)
        for node, arm, source in loop.arms(event)
        for statement in getattr(node, arm, [])
    )


def _is_trained(program: ScriptProgram, event: ProgramEvent, training: list[ProgramEvent]) -> bool:
    """Return whether the training loop calls this module with gradients (averaged weights are not)."""
    assert event.subject is not None
    return any(
        isinstance(call.node, ast.Call)
        and call.kind == "call"
        and not without_gradients(call)
        and program.values.same(call.source, call.node.func, event.source, event.subject)
        for call in training
    )


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    modes, modules = profile.settings.get("training") or {}, profile.settings.get("modules") or {}
    asleep = int(modes.get("eval") or modes.get("False") or 0)
    awake = int(modes.get("train") or modes.get("True") or 0)
    concerned = [name for name in modules if name.startswith(DIFFERENT)]
    if not asleep or awake or not concerned:  # with parts frozen on purpose, others are not frozen
        return
    _, _, places = event_of(profile, "forward")
    yield RULE.profile_finding(
        f"all {asleep} modules are in evaluation mode during training, including {', '.join(concerned)}",
        places[:1],
    )


RULE = Rule(
    "FL016",
    "train_mode_not_restored",
    Severity.WRONG,
    __doc__,
    check_source,
    check_profile,
)
