"""The best weights are kept without a copy.

What:
    The training loop sets a name to `model.state_dict()`. Later, that name is loaded, saved or returned as the
    best state. Or a trainer keeps it as its best state.
Why it matters:
    `state_dict()` returns the live tensors, and every later step changes them. The program loads the last
    weights, not the best. Early stopping and "keep the best" have no effect.
How to fix it:
    Use `copy.deepcopy(model.state_dict())`, or save the state to a file immediately.
Bad:
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
            best, kept = loss.item(), model.state_dict()  # <-
    model.load_state_dict(kept)
Good:
    import copy

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
            best, kept = loss.item(), copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
Sources:
    https://docs.pytorch.org/tutorials/beginner/saving_loading_models.html
    ("best_model_state = model.state_dict() returns a reference")
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import returns
from flatout.schema.findings import Finding, Severity


def look(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in [*loop.around, *loop.events]:
            statement = event.node
            if event.kind != "assign" or not isinstance(statement, ast.Assign):
                continue
            for target, value in _pairs(statement):
                if (
                    isinstance(value, ast.Call)
                    and isinstance(value.func, ast.Attribute)
                    and value.func.attr == "state_dict"
                    and not value.args
                    and _is_model(program, loop, event, value.func.value)
                    and (_used_later(program, event, target) or _best_of_object(loop, event, target))
                ):
                    kept, model = event.source.code(target), event.source.code(value.func.value)
                    yield RULE.finding(
                        f"`{kept}` holds the live weights of `{model}`, which every later step changes: "
                        "the state loaded afterwards is not the best one",
                        event.place,
                        f"{kept} = copy.deepcopy({event.source.code(value)})",
                    )


def _pairs(statement: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    target = statement.targets[0]
    if (
        isinstance(target, ast.Tuple)
        and isinstance(statement.value, ast.Tuple)
        and len(target.elts) == len(statement.value.elts)
    ):
        return list(zip(target.elts, statement.value.elts, strict=True))
    return [(target, statement.value)]


def _is_model(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, owner: ast.expr) -> bool:
    """Return whether a value is a model: by its kind, or because the program sets its mode."""
    kinds = program.values.kinds(event.source, owner) - {"NoneType"}
    modes = [*loop.of("train", "eval"), *(each for each in loop.around if each.kind in ("train", "eval"))]
    return "Module" in kinds or (
        not kinds
        and any(
            each.source is event.source
            and each.subject is not None
            and ast.unparse(each.subject) == ast.unparse(owner)
            for each in modes
        )
    )


def _best_of_object(loop: StepLoop, event: ProgramEvent, target: ast.expr) -> bool:
    """Return whether an object keeps its best state after a comparison, and no pass writes it to a file."""
    compared = any(
        isinstance(node, ast.If) and any(isinstance(each, ast.Compare) for each in ast.walk(node.test))
        for node, _, _ in event.arms
    )
    kept = ast.unparse(target)
    return (
        compared
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
        and isinstance(target, ast.Name)
        and any(isinstance(each, ast.Name) and each.id == target.id for each in returns(function))
    ):
        return True
    for call in event.source.calls:
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if name in ("load_state_dict", "save") and id(call) not in inside and call.args:
            mentioned = call.args[0]
            if (
                type(mentioned) is type(target)
                and ast.unparse(mentioned) == ast.unparse(target)
                and event.source.function(call) is event.source.function(event.node)
            ):
                return True
    return False


RULE = Rule("FL032", "best_weights_not_copied", Severity.WRONG, __doc__, look=look)
