"""The evaluation builds autograd graphs that are never used.

What:
    After `model.eval()`, a loop runs the model without `backward()` and outside `torch.no_grad()`. Or a loop
    over a DataLoader does so with a model that another loop trains, and uses only numbers and classes of its
    output.
Why it matters:
    Autograd keeps every activation of the batch for a backward pass that never runs. An evaluation needs as
    much memory as a training step, and each operation is slower. If the program keeps an output or a loss,
    its graph is kept too.
How to fix it:
    Put `with torch.no_grad():` or `with torch.inference_mode():` around the loop.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    model.eval()
    total = 0.0
  - for x in torch.randn(10, 8, 4):
  -     total += model(x).square().mean().item()  # <-
  + with torch.no_grad():
  +     for x in torch.randn(10, 8, 4):
  +         total += model(x).square().mean().item()
Sources:
    https://docs.pytorch.org/docs/stable/notes/autograd.html#locally-disabling-gradient-computation
"""

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.gains import event_of
from flatout.diagnose.rewrites import wrap_in_with
from flatout.diagnose.rule import Rule
from flatout.probe.evaluation_loops import modes_of_model
from flatout.probe.inner_gradients import needs_gradients
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import LoopVisit, ProgramEvent, loops_over
from flatout.schema.findings import Edit, Finding, Severity
from flatout.schema.profile import ProfileRecord

OFF = (
    "torch.no_grad",
    "torch.inference_mode",
    "torch.set_grad_enabled",
    "torch.autograd.no_grad",
    "torch.autograd.inference_mode",
    "torch.autograd.set_grad_enabled",
    "torch.autograd.grad_mode.set_grad_enabled",
)

CUTS = ("item", "argmax", "max", "topk", "detach", "tolist", "numpy")  # a number, or classes among others

TRAINS = {"train", "fit", "train_epoch", "train_one_epoch", "train_step", "_train_epoch"}

HARMLESS = (
    "torch.autocast",
    "torch.amp.",
    "torch.cuda.",
    "torch.profiler.",
    "contextlib.nullcontext",
    "tqdm.",
    "functools.",
    "warnings.",
)


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions("LightningModule") or _switched_by_call(program):
        return
    modes: list[ProgramEvent] = []
    info: set[int] = set()
    busy = {loop for each in program.events if each.kind in ("backward", "step") for loop in each.loops}
    for event in program.events:
        if event.kind in ("eval", "train") and event.subject is not None:
            modes.append(event)
        if (
            event.kind != "call"
            or not isinstance(event.node, ast.Call)
            or not event.loops
            or id(event.loops[-1].node) in info
        ):
            continue
        if event.loops[-1] in busy:
            continue
        in_evaluation = _evaluates(program, event, modes)
        if in_evaluation or _only_measures(program, event):
            if not info and needs_gradients(program):
                return
            info.add(id(event.loops[-1].node))
            loop = event.loops[-1]
            source, call = loop.reached(event)
            name = event.source.code(event.node.func)
            where = "is in evaluation mode here and" if in_evaluation else "only computes a metric here, but"
            yield RULE.finding(
                f"`{name}` {where} builds a graph for a backward pass that never runs",
                source.place(call),
                f"with torch.no_grad():  # around the loop on line {loop.source.place(loop.node).line}",
                others=[] if call is event.node else [event.place],
                edits=_edits(event, loop),
            )


def _edits(event: ProgramEvent, loop: LoopVisit) -> list[Edit]:
    """Return the edit of the loop; none if the function may still need a graph, or is a generator."""
    source, top = loop.source, loop.node
    scope = source.function(top) or top
    doubts = any(
        isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.AsyncFor))
        or (isinstance(node, ast.Attribute) and node.attr in ("backward", "grad", "autograd"))
        for node in ast.walk(scope)
    )
    bound = source.names.module.names.get("torch", [])
    torch = bool(bound) and all(each.how == "import" and each.dotted == "torch" for each in bound)
    same_file = source is event.source and source.place(top).file == event.place.file
    if doubts or not torch or not same_file or not isinstance(top, (ast.For, ast.While)):
        return []
    return wrap_in_with(source, top, "torch.no_grad()")


def _switched_by_call(program: ScriptProgram) -> bool:
    """Return whether a call on its own line disables gradients, for an unknown span."""
    return any(isinstance(source.parent(call), ast.Expr) for source, call in program.calls(*OFF))


def _evaluates(program: ScriptProgram, event: ProgramEvent, modes: list[ProgramEvent]) -> bool:
    """Return whether a call runs a trained module with gradients, in evaluation mode set in its function."""
    assert isinstance(event.node, ast.Call)
    model = event.node.func
    if (
        "Module" not in program.values.kinds(event.source, model)
        or "Loss" in program.values.kinds(event.source, model)
        or any(_off(event))
    ):
        return False
    own = modes_of_model(program, event, modes)
    set_here = bool(own) and own[-1].kind == "eval" and bool(own[-1].frames) == bool(event.frames)
    return set_here and not _callers_may_switch(program, event, own[-1])


def _callers_may_switch(program: ScriptProgram, event: ProgramEvent, mode: ProgramEvent) -> bool:
    """Return whether callers that are not visible may disable gradients around this evaluation.

    They cannot if the same function trains. They hardly do for a method that sets the mode itself, in a class
    that trains as well.
    """
    root, source = event.root, mode.source
    klass = source.klass(root) if isinstance(root, FUNCTIONS) else None
    if not isinstance(root, FUNCTIONS) or (klass is None and not _given(program, event)):
        return False
    if root.name in TRAINS or any(each.kind == "backward" and each.root is root for each in program.events):
        return False
    if klass is None or len(mode.frames) > 1 or program.mentions("enable_grad", "requires_grad_"):
        return True
    return not any(
        isinstance(each, FUNCTIONS) and each.name in TRAINS
        for _, owner in program.values.gradient_sources(source, klass)
        for each in owner.body
    )


def _given(program: ScriptProgram, event: ProgramEvent) -> bool:
    assert isinstance(event.node, ast.Call)
    return any(isinstance(each.node, ast.arg) for each in program.origins(event.source, event.node.func))


def _only_measures(program: ScriptProgram, event: ProgramEvent) -> bool:
    """Return whether a loop over a loader calls a model that another loop trains, for numbers and classes only."""
    assert isinstance(event.node, ast.Call)
    loop, model = event.loops[-1], event.node.func
    over = loops_over(loop.node)
    if (
        over is None
        or not program.values.is_a(loop.source, over, "DataLoader")
        or "Module" not in program.values.kinds(event.source, model)
        or "Loss" in program.values.kinds(event.source, model)
        or any(_off(event))
    ):
        return False
    trained = any(
        isinstance(each.node, ast.Call)
        and program.values.same(each.source, each.node.func, event.source, model)
        for step_loop in program.step_loops
        for each in step_loop.of("call")
    )
    # A loss that is summed up here may be differentiated after the loop.
    later = any(each.kind == "backward" and each.loops == event.loops[:-1] for each in program.events)
    return trained and not later and _leaves_no_graph(event.source, event.node, loop.node)


def _leaves_no_graph(source: SourceFile, call: ast.Call, loop: ast.AST) -> bool:
    """Return whether every use of the model's output in the loop gives numbers, classes or detached values."""
    if _cut(source, call):
        return True
    statement = source.statement(call)
    if not isinstance(statement, ast.Assign):
        return False
    names = {
        node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)
    }
    uses = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load)
    ]
    return bool(uses) and all(_cut(source, use) for use in uses)


def _cut(source: SourceFile, value: ast.expr) -> bool:
    """Return whether a call around a value, in the same statement, cuts its graph."""
    for around in source.parents(value):
        if isinstance(around, ast.stmt):
            return False
        func = around.func if isinstance(around, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr in CUTS:
            return True
    return False


def _off(event: ProgramEvent) -> Iterator[bool]:
    """Yield once for each ``with`` or decorator around a call that may disable gradients."""
    for source, block in event.blocks:
        called = block.func if isinstance(block, ast.Call) else block
        builtin = isinstance(called, ast.Name) and called.id in (
            "open",
            "tqdm",
            "staticmethod",
            "classmethod",
            "property",
        )
        if not builtin and not source.dotted(called).startswith(HARMLESS):
            yield True


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    calls, _, places = event_of(profile, "eval_with_grad")
    if calls and places:
        said = f"the model was called {calls:.3g} times per {profile.unit} in evaluation mode with gradients enabled"
        yield RULE.profile_finding(said, places)


RULE = Rule(
    "FL201",
    "eval_without_no_grad",
    Severity.MEMORY,
    __doc__,
    check_source,
    check_profile,
    fix_changes="nothing that is learned; layers with another path without gradients may round figures of the evaluation differently",
    sort_before=Severity.TIME,
    weight=-1,
    replaced_by=("train_mode_not_restored",),
)
