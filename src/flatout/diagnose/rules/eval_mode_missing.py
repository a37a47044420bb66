"""The model is evaluated in training mode.

What:
    A loop under `torch.no_grad()` runs a model with Dropout or BatchNorm, and `model.eval()` is never called.
    Or it is called, but the loop then calls `model.train()` before it runs the model. If the layers of the
    model are not visible, the rule expects that a training calls `train()` and evaluates between its epochs.
Why it matters:
    Dropout stays active, so the results are too poor and change from run to run. BatchNorm normalises each
    test batch on its own, and updates its running statistics with test data. The test data leaks into the
    model, which is then trained further.
How to fix it:
    Call `model.eval()` before the evaluation and `model.train()` after it.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train, test = torch.randn(10, 8, 4), torch.randn(10, 8, 4)
    for x in train:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    total = 0.0
  + model.eval()
    with torch.no_grad():
        for x in test:
            total += model(x).square().mean().item()  # <-
  + model.train()
    print(total / 10)
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.evaluation_mode import evaluates_in_training_mode
from flatout.diagnose.rule import Rule
from flatout.probe.call_chain import same
from flatout.probe.contexts import without_gradients
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import COUNTS, ProgramEvent, implies, mentions, together
from flatout.schema.findings import Finding, Severity

MODES = {
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "AlphaDropout",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "SyncBatchNorm",
}


def check(program: ScriptProgram) -> Iterator[Finding]:
    yield from _switched_back(program)
    switched = any(event.kind in ("eval", "train") for event in program.events if event.kind == "eval")
    if switched or not program.step_loops or program.mentions("LightningModule", "Trainer", "eval"):
        return
    seen: set[int] = set()
    for event in program.events:
        if (
            event.kind == "call"
            and isinstance(event.node, ast.Call)
            and event.loops
            and id(event.loops[-1].node) not in seen
            and without_gradients(event)
            and not _of_a_step(program, event)
            and _is_trained(program, event)
        ):
            model = event.node.func
            layer = has_mode(program, event.source, model)
            if not layer and not evaluates_in_training_mode(program, event):
                continue
            seen.add(id(event.loops[-1].node))
            source, call = event.loops[-1].reached(event)
            name = event.source.code(model)
            why = f"has {layer} and is evaluated" if layer else "is trained after `train()`, and evaluated"
            yield RULE.finding(
                f"`{name}` {why} here in training mode: `eval()` is never called",
                source.place(call),
                f"{name}.eval()   # before the loop\n{name}.train()  # after it",
                others=[] if call is event.node else [event.place],
                weight=0 if layer else -1,
            )


def _of_a_step(program: ScriptProgram, event: ProgramEvent) -> bool:
    """Return whether a call belongs to the training steps: not to a validation that runs after some of them."""
    for loop in program.step_loops:
        if loop.loop in event.loops:
            tests = [node.test for node, _, _ in loop.arms(event) if isinstance(node, ast.If)]
            if event.loops[-1] is loop.loop or not any(
                mentions(each, (*COUNTS, "val", "test")) for each in tests
            ):
                return True
    return False


def _switched_back(program: ScriptProgram) -> Iterator[Finding]:
    """Yield a ``train()`` between an ``eval()`` and the first run of the model, all of it without gradients.

    A loop that calls ``eval()`` itself runs the model in both modes on purpose.
    """
    events = program.events
    for at, event in enumerate(events):
        if event.kind != "train" or event.subject is None or not without_gradients(event):
            continue
        if any(not isinstance(each, ast.Constant) for each in getattr(event.node, "args", ())):
            continue  # train(mode)
        loop = event.loops[-1] if event.loops else None
        around = [
            number
            for number, each in enumerate(events)
            if each.root is event.root and together(each, event) and _changes_mode(program, each, event)
        ]
        last = max((number for number in around if number < at), default=None)
        if last is None or events[last].kind != "eval" or (loop is not None and loop in events[last].loops):
            continue
        if any(loop in events[number].loops and events[number].kind == "eval" for number in around):
            continue
        end = min((number for number in around if number > at), default=len(events))
        runs = next((each for each in events[at:end] if _runs(program, each, event)), None)
        if runs is None or any(_runs(program, each, event) for each in events[last:at]):
            continue
        if implies(event, runs) and without_gradients(runs):
            name = event.source.code(event.subject)
            yield RULE.finding(
                f"line {events[last].place.line} sets `{name}` to evaluation mode, but this sets it back before it is run",
                event.place,
                f"# remove this line: `{name}` is evaluated here",
                others=[runs.place],
            )


def _runs(program: ScriptProgram, call: ProgramEvent, event: ProgramEvent) -> bool:
    """Return whether a call runs the model whose mode an event sets."""
    return (
        call.kind == "call"
        and isinstance(call.node, ast.Call)
        and call.root is event.root
        and together(call, event)
        and event.subject is not None
        and same(program, call, call.node.func, event, event.subject) is True
    )


def _changes_mode(program: ScriptProgram, one: ProgramEvent, other: ProgramEvent) -> bool:
    return (
        one.kind in ("train", "eval")
        and one.subject is not None
        and other.subject is not None
        and same(program, one, one.subject, other, other.subject) is True
    )


def has_mode(program: ScriptProgram, source: SourceFile, model: ast.AST) -> str:
    """Return the class of the first layer that behaves differently in training, or an empty string."""
    for origin in program.origins(source, model):
        parts: list[tuple[SourceFile, ast.AST]] = [(origin.source, origin.node)]
        if isinstance(origin.node, ast.Call):
            parts += program.class_named(origin.source, origin.node.func)
        for home, part in parts:
            for node in ast.walk(part):
                if (
                    isinstance(node, ast.Call)
                    and (dotted := home.dotted(node.func)).startswith("torch.nn.")
                    and dotted.rpartition(".")[2] in MODES
                ):
                    return dotted.rpartition(".")[2]
    return ""


def _is_trained(program: ScriptProgram, event: ProgramEvent) -> bool:
    assert isinstance(event.node, ast.Call)
    return any(
        isinstance(each.node, ast.Call)
        and each.kind == "call"
        and not without_gradients(each)
        and program.values.same(each.source, each.node.func, event.source, event.node.func)
        for loop in program.step_loops
        for each in loop.events
    )


RULE = Rule("FL015", "eval_mode_missing", Severity.WRONG, __doc__, check)
