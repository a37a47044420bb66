"""The loss of a step, with its graph: which expressions are it, and through which calls it is handed on."""

from __future__ import annotations

import ast

from flatout.probe.contexts import without_gradients
from flatout.probe.names import Binding
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import argument
from flatout.probe.windows import last_name

# Methods whose result has the graph of their object, and functions whose result has that of their argument.
KEEP_GRAPH = {
    "cpu",
    "cuda",
    "to",
    "float",
    "double",
    "half",
    "mean",
    "sum",
    "clone",
    "squeeze",
    "view",
    "reshape",
}
WITHOUT_GRAPH = {"item", "detach", "tolist", "numpy", "float", "int", "no_grad"}
DIFFERENTIABLE = {"horovod.torch.allreduce"}


def graph_of(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, kept: ast.expr) -> ast.expr | None:
    """Return the loss in the kept value if it still has its graph, alone or scaled by numbers."""
    if isinstance(kept, ast.BinOp) and isinstance(kept.op, (ast.Mult, ast.Div)):
        return graph_of(program, loop, event, kept.left) or graph_of(program, loop, event, kept.right)
    if (isinstance(kept, ast.Attribute) and kept.attr in ("data", "grad")) or not isinstance(
        kept, (ast.Name, ast.Attribute)
    ):
        return None
    if without_gradients(event):
        return None
    if _detached(event, kept):
        return None
    for backward in loop.of("backward"):
        if backward.subject is None:
            continue
        alike = backward.source is event.source and ast.dump(backward.subject) == ast.dump(kept)
        if alike and event.source.function(event.node) is event.source.function(backward.node):
            return kept
        if _computed(program, event.source, kept) in _summands(program, backward):
            return kept
    return None


def _computed(program: ScriptProgram, source: SourceFile, node: ast.expr) -> int:
    """Return the id of the only call that computes a value in this function, or 0 if there is none or several."""
    if isinstance(node, ast.Name) and any(each.how != "assign" for each in source.names.reaching(node)):
        return 0
    found = program.origins(source, node)
    call = found[0].node if len(found) == 1 and not found[0].part else None
    if not isinstance(call, ast.Call) or last_name(call.func) in WITHOUT_GRAPH:
        return 0
    return id(call)


def _summands(program: ScriptProgram, backward: ProgramEvent) -> set[int]:
    """Return the ids of the calls that compute the loss of a backward pass, or terms that it is the sum of."""
    assert backward.subject is not None
    waiting = [(backward.source, backward.subject)]
    found: set[int] = set()
    for _ in range(20):
        if not waiting:
            break
        source, node = waiting.pop()
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, (ast.Add, ast.Sub)):
                waiting.append((source, node.right))
            waiting.append((source, node.left))
            continue
        for origin in program.origins(source, node):
            if isinstance(origin.node, ast.BinOp) and not origin.part:
                waiting.append((origin.source, origin.node))
            elif isinstance(origin.node, ast.Call) and not origin.part:
                found.add(id(origin.node))
    return found


def loss_given(
    program: ScriptProgram, loop: StepLoop, source: SourceFile, node: ast.AST, depth: int = 0
) -> ProgramEvent | None:
    """Return the call in this loop that passes the loss, with its graph, for the parameter in an expression."""
    if depth > 6:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        return loss_given(program, loop, source, node.left, depth + 1) or loss_given(
            program, loop, source, node.right, depth + 1
        )
    if isinstance(node, ast.Call):
        if source.dotted(node.func) in DIFFERENTIABLE and node.args:
            return loss_given(program, loop, source, node.args[0], depth + 1)
        if isinstance(node.func, ast.Attribute) and node.func.attr in KEEP_GRAPH:
            return loss_given(program, loop, source, node.func.value, depth + 1)
    if isinstance(node, ast.Attribute):
        value = _just_set(source, node)
        return loss_given(program, loop, source, value, depth + 1) if value is not None else None
    bindings = source.names.reaching(node) if isinstance(node, ast.Name) else []
    if len(bindings) != 1:
        return None
    if bindings[0].how == "assign" and bindings[0].value is not None and not bindings[0].path:
        return loss_given(program, loop, source, bindings[0].value, depth + 1)
    function = source.function(node)
    if bindings[0].how != "parameter" or function is None:
        return None
    callers = {id(call) for _, call in program.callers(function)}
    for call in loop.of("call"):
        if id(call.node) in callers and not without_gradients(call):
            assert isinstance(call.node, ast.Call)
            given = argument(source, function, bindings[0].node, call.node)
            if given is not None and (
                graph_of(program, loop, call, given)
                or loss_given(program, loop, call.source, given, depth + 1)
            ):
                return call
    return None


def _just_set(source: SourceFile, node: ast.Attribute) -> ast.expr | None:
    """Return what an attribute of ``self`` was set to earlier in the same function: ``self.value = value``."""
    function = source.function(node)
    sets = [
        each.value
        for each in ast.walk(function or ast.Pass())
        if isinstance(each, ast.Assign)
        and each.lineno < node.lineno
        and [ast.unparse(target) for target in each.targets] == [ast.unparse(node)]
    ]
    return sets[-1] if len(sets) == 1 and ast.unparse(node).startswith("self.") else None


def _detached(event: ProgramEvent, kept: ast.expr) -> bool:
    """Return whether the name gets a value without a graph before it is kept: ``loss = loss.item()``."""
    bindings: list[Binding] = event.source.names.reaching(kept) if isinstance(kept, ast.Name) else []
    return any(
        isinstance(b.value, ast.Call)
        and isinstance(b.value.func, (ast.Attribute, ast.Name))
        and (
            getattr(b.value.func, "attr", "") in ("item", "detach", "cpu", "numpy")
            or getattr(b.value.func, "id", "") == "float"
        )
        for b in bindings
        if b.value is not None
    )
