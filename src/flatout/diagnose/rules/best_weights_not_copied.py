"""The best weights are kept without a copy.

What:
    The training loop sets a name, or an entry of it, to `model.state_dict()` or to a shallow copy of it. Later,
    that name is loaded, saved or returned as the best state. Or a trainer keeps it as its best state.
Why it matters:
    `state_dict()` returns the live tensors, and every later step changes them. The program loads the last
    weights, not the best. Early stopping and "keep the best" have no effect.
How to fix it:
    Use `copy.deepcopy(model.state_dict())`, or save the state to a file immediately.
Example:
  + import copy
  +
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best, kept = float("inf"), None
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if loss.item() < best:
  -         best, kept = loss.item(), model.state_dict()  # <-
  +         best, kept = loss.item(), copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
    ("best_model_state = model.state_dict() returns a reference")
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import position
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import returns
from flatout.probe.windows import counts
from flatout.schema.findings import Finding, Severity

OF_MODULES = {"parameters", "named_parameters", "modules"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in [*loop.around, *loop.events]:
            statement = event.node
            if event.kind != "assign" or not isinstance(statement, ast.Assign):
                continue
            for target, value, entry in _pairs(statement):
                owner = live_state(event.source, value)
                if (
                    owner is not None
                    and _is_model(program, loop, event, owner)
                    and (not entry or _compared(event))
                    and (_used_later(program, event, target) or _best_of_object(loop, event, target))
                ):
                    kept, model = event.source.code(target), event.source.code(owner)
                    yield RULE.finding(
                        f"`{kept}` holds the live weights of `{model}`, which every later step changes: "
                        "the state loaded afterwards is not the best one",
                        event.place,
                        f"{kept} = copy.deepcopy({event.source.code(value)})"
                        if not entry
                        else f"copy.deepcopy({event.source.code(value)})",
                    )


def live_state(source: SourceFile, value: ast.expr) -> ast.expr | None:
    """Return the object whose ``state_dict()`` a value is, or is a shallow copy of, or None.

    ``dict(state)``, ``copy.copy(state)``, ``state.copy()`` and ``{k: v for k, v in state.items()}`` copy no tensor.
    """
    if isinstance(value, ast.DictComp) and len(value.generators) == 1:
        names = value.generators[0].target
        over = value.generators[0].iter
        same = (
            isinstance(names, ast.Tuple)
            and len(names.elts) == 2
            and isinstance(value.value, ast.Name)
            and ast.unparse(names.elts[1]) == value.value.id
        )
        items = (
            isinstance(over, ast.Call) and isinstance(over.func, ast.Attribute) and over.func.attr == "items"
        )
        return live_state(source, over.func.value) if same and items else None  # type: ignore[attr-defined]
    if not isinstance(value, ast.Call):
        return None
    if len(value.args) == 1 and (
        source.dotted(value.func) in ("copy.copy", "collections.OrderedDict")
        or (isinstance(value.func, ast.Name) and value.func.id == "dict")
    ):
        return live_state(source, value.args[0])
    if not isinstance(value.func, ast.Attribute) or value.args:
        return None
    if value.func.attr == "copy":
        return live_state(source, value.func.value)
    return value.func.value if value.func.attr == "state_dict" else None


def _pairs(statement: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr, bool]]:
    """Yield the targets of an assignment with their values, and whether the value is an entry of a dictionary."""
    target, value = statement.targets[0], statement.value
    pairs = [(target, value)]
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        pairs = list(zip(target.elts, value.elts, strict=True))
    for name, given in pairs:
        entries = (
            [*given.values]
            if isinstance(given, ast.Dict)
            else [k.value for k in given.keywords]
            if isinstance(given, ast.Call) and isinstance(given.func, ast.Name) and given.func.id == "dict"
            else [*given.elts]
            if isinstance(given, (ast.Tuple, ast.List))
            else []
        )
        yield name, given, False
        yield from ((name, entry, True) for entry in entries)


def _is_model(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, owner: ast.expr) -> bool:
    """Return whether a value is a model: by its kind, or because the program treats it as one.

    Training calls it, or the program sets its mode or asks for its parameters.
    """
    kinds = program.values.kinds(event.source, owner) - {"NoneType"}
    if kinds:
        return "Module" in kinds
    written = ast.unparse(owner)
    around = [*loop.events, *loop.around]
    treated = [
        each.subject for each in around if each.kind in ("train", "eval") and each.source is event.source
    ]
    treated += [
        each.node.func
        for each in loop.of("call")
        if each.source is event.source and isinstance(each.node, ast.Call)
    ]
    treated += [
        call.func.value
        for call in event.source.calls
        if isinstance(call.func, ast.Attribute) and call.func.attr in OF_MODULES
    ]
    return any(each is not None and ast.unparse(each) == written for each in treated)


def _compared(event: ProgramEvent) -> bool:
    """Return whether an event depends on a comparison, other than of the number of a step."""
    return any(
        isinstance(node, ast.If)
        and any(isinstance(each, ast.Compare) for each in ast.walk(node.test))
        and not counts(node.test)
        for node, _, _ in event.arms
    )


def _best_of_object(loop: StepLoop, event: ProgramEvent, target: ast.expr) -> bool:
    """Return whether an object keeps its best state after a comparison, and no pass writes it to a file."""
    kept = ast.unparse(target)
    return (
        _compared(event)
        and isinstance(target, ast.Attribute)
        and "best" in target.attr.lower()
        and not any(
            isinstance(each.node, ast.Call)
            and any(ast.unparse(argument) == kept for argument in each.node.args)
            for each in [*loop.around, *loop.events]
        )
    )


def _used_later(program: ScriptProgram, event: ProgramEvent, target: ast.expr) -> bool:
    """Return whether the kept state is loaded, saved or returned outside the loop that keeps it."""
    inside = {id(each.node) for each in program.events if event.loops[0] in each.loops}
    function = event.source.function(event.node)
    if (
        function is not None
        and event.source.function(event.loops[0].node) is function
        and isinstance(target, ast.Name)
        and any(isinstance(each, ast.Name) and each.id == target.id for each in returns(function))
    ):
        return True
    for call in event.source.calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in ("load_state_dict", "save") and id(call) not in inside and call.args:
            mentioned = call.args[0]
            while isinstance(mentioned, ast.Subscript) and not isinstance(target, ast.Subscript):
                mentioned = mentioned.value
            if (
                type(mentioned) is type(target)
                and ast.unparse(mentioned) == ast.unparse(target)
                and event.source.function(call) is event.source.function(event.node)
                and position(call) > position(event.node)
            ):
                return True
    return False


RULE = Rule("FL032", "best_weights_not_copied", Severity.WRONG, __doc__, check)
