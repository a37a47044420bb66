"""The loss of a step, with its graph: which expressions are it, and through which calls it is handed on."""

import ast

from flatout.probe.contexts import without_gradients
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import argument
from flatout.probe.windows import last_name

# Methods whose result has the graph of their object, and functions whose result has that of their argument.
KEEPS_GRAPH = {
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


def graph_of(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, value: ast.expr) -> ast.expr | None:
    """The loss in a value that is stored, if it still has its graph, alone or scaled by numbers."""
    match value:
        case ast.BinOp(op=ast.Mult() | ast.Div()):
            return graph_of(program, loop, event, value.left) or graph_of(program, loop, event, value.right)
        case ast.Attribute(attr="data" | "grad"):
            return None
        case ast.Name() | ast.Attribute():
            if without_gradients(event) or _is_detached(event, value):
                return None
        case _:
            return None
    for backward in loop.of("backward"):
        if backward.subject is None:
            continue
        alike = backward.source is event.source and ast.dump(backward.subject) == ast.dump(value)
        if alike and event.source.function(event.node) is event.source.function(backward.node):
            return value
        if _computing_call(program, event.source, value) in _summand_calls(program, backward):
            return value
    return None


def _computing_call(program: ScriptProgram, source: SourceFile, node: ast.expr) -> int:
    """The id of the only call that computes a value in this function, or 0 if there is none or several."""
    if isinstance(node, ast.Name) and any(binding.how != "assign" for binding in source.names.reaching(node)):
        return 0
    origins = program.origins(source, node)
    call = origins[0].node if len(origins) == 1 and not origins[0].part else None
    if not isinstance(call, ast.Call) or last_name(call.func) in WITHOUT_GRAPH:
        return 0
    return id(call)


def _summand_calls(program: ScriptProgram, backward: ProgramEvent) -> set[int]:
    """The ids of the calls that compute the loss of a backward pass, or terms that it is the sum of."""
    assert backward.subject is not None
    queue = [(backward.source, backward.subject)]
    calls: set[int] = set()
    for _ in range(20):
        if not queue:
            break
        source, node = queue.pop()
        if isinstance(node, ast.BinOp):
            if isinstance(node.op, (ast.Add, ast.Sub)):
                queue.append((source, node.right))
            queue.append((source, node.left))
            continue
        for origin in program.origins(source, node):
            if isinstance(origin.node, ast.BinOp) and not origin.part:
                queue.append((origin.source, origin.node))
            elif isinstance(origin.node, ast.Call) and not origin.part:
                calls.add(id(origin.node))
    return calls


def call_with_loss(
    program: ScriptProgram, loop: StepLoop, source: SourceFile, node: ast.AST, depth: int = 0
) -> ProgramEvent | None:
    """The call in this loop that passes the loss, with its graph, for the parameter in an expression."""
    if depth > 6:
        return None
    match node:
        case ast.BinOp(left, ast.Mult() | ast.Div(), right):
            return call_with_loss(program, loop, source, left, depth + 1) or call_with_loss(
                program, loop, source, right, depth + 1
            )
        case ast.Call(func, [value, *_]) if source.dotted(func) in DIFFERENTIABLE:
            return call_with_loss(program, loop, source, value, depth + 1)
        case ast.Call(ast.Attribute(value, method)) if method in KEEPS_GRAPH:
            return call_with_loss(program, loop, source, value, depth + 1)
        case ast.Attribute():
            stored = _value_set(source, node)
            return call_with_loss(program, loop, source, stored, depth + 1) if stored is not None else None
    bindings = source.names.reaching(node) if isinstance(node, ast.Name) else []
    if len(bindings) != 1:
        return None
    if bindings[0].how == "assign" and bindings[0].value is not None and not bindings[0].path:
        return call_with_loss(program, loop, source, bindings[0].value, depth + 1)
    function = source.function(node)
    if bindings[0].how != "parameter" or function is None:
        return None
    callers = {id(call) for _, call in program.callers(function)}
    for call in loop.of("call"):
        if id(call.node) in callers and not without_gradients(call):
            assert isinstance(call.node, ast.Call)
            passed = argument(source, function, bindings[0].node, call.node)
            if passed is not None and (
                graph_of(program, loop, call, passed)
                or call_with_loss(program, loop, call.source, passed, depth + 1)
            ):
                return call
    return None


def _value_set(source: SourceFile, node: ast.Attribute) -> ast.expr | None:
    """What an attribute of ``self`` was set to earlier in the same function: ``self.value = value``."""
    function = source.function(node)
    values = [
        statement.value
        for statement in ast.walk(function or ast.Pass())
        if isinstance(statement, ast.Assign)
        and statement.lineno < node.lineno
        and [ast.unparse(target) for target in statement.targets] == [ast.unparse(node)]
    ]
    return values[-1] if len(values) == 1 and ast.unparse(node).startswith("self.") else None


def _is_detached(event: ProgramEvent, stored: ast.expr) -> bool:
    """Whether the name gets a value without a graph before it is stored: ``loss = loss.item()``."""
    for binding in event.source.names.reaching(stored) if isinstance(stored, ast.Name) else ():
        match binding.value:
            case (
                ast.Call(func=ast.Attribute(attr="item" | "detach" | "cpu" | "numpy"))
                | ast.Call(func=ast.Name("float"))
            ):
                return True
    return False
