"""Reads of the device in the ``step`` of the program's own optimizers: it runs in each training step."""

import ast
from collections.abc import Iterator

from flatout.diagnose.independent_loops import LOOPS
from flatout.probe.device_values import on_device
from flatout.probe.each_step import called
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import COUNTS, SWITCHES, mentions

READ_METHODS = {"item", "tolist", "cpu", "numpy", "nonzero"}
CASTS = {"float", "int", "bool"}


def optimizer_reads(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.expr, ast.expr, bool]]:
    """Yield each read with the tensor, and whether it happens for each parameter."""
    for home, klass in optimizer_classes(program):
        functions = list(_step_functions(program, home, klass))
        if any(_is_line_search(source, function) for source, function, _ in functions):
            continue  # it decides by the value of the loss
        for source, function, in_loop in functions:
            statements: set[int] = set()
            for node in ast.walk(function):
                tensor = _tensor_read(source, node)
                statement = source.statement(node)
                if (
                    tensor is None
                    or id(statement) in statements
                    or source.function(node) is not function
                    or not on_device(source, tensor)
                    or _runs_rarely(source, node, function)
                ):
                    continue
                statements.add(id(statement))
                in_inner_loop = in_loop or any(
                    isinstance(parent, LOOPS)
                    for parent in source.parents(node)
                    if source.function(parent) is function
                )
                assert isinstance(node, ast.expr)
                yield source, node, tensor, in_inner_loop


def optimizer_classes(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
    """Yield the program's own subclasses of torch's optimizers."""
    for source in program.sources:
        for klass in source.classes:
            bases = program.values.bases(source, klass)
            if any(base.startswith("torch.optim.") and "lr_scheduler" not in base for base in bases):
                yield source, klass


def _step_functions(
    program: ScriptProgram, source: SourceFile, klass: ast.ClassDef
) -> Iterator[tuple[SourceFile, ast.AST, bool]]:
    """Yield the step of an optimizer and the functions that it calls, and whether a loop is around the call."""
    queue = [(home, method, False) for home, method in program.methods(source, klass, "step")]
    visited: set[int] = set()
    while queue:
        home, function, in_loop = queue.pop(0)
        if id(function) in visited or not isinstance(function, FUNCTIONS):
            continue
        visited.add(id(function))
        yield home, function, in_loop
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Call)
                and home.function(node) is function
                and not _runs_rarely(home, node, function)
            ):
                in_inner_loop = in_loop or any(isinstance(parent, LOOPS) for parent in home.parents(node))
                queue += [(file, callee, in_inner_loop) for file, callee in called(program, home, node)]


def _is_line_search(source: SourceFile, function: ast.AST) -> bool:
    """Whether a loop evaluates the closure again and again."""
    return any(
        isinstance(node, ast.Call)
        and "closure" in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
        and any(isinstance(parent, (ast.For, ast.While)) for parent in source.parents(node))
        for node in ast.walk(function)
    )


def _tensor_read(source: SourceFile, node: ast.AST) -> ast.expr | None:
    """The tensor whose value a node fetches: by a method, a conversion, or as a condition."""
    if isinstance(node, ast.Call):
        dotted = source.dotted(node.func)
        match node:
            case ast.Call(func=ast.Attribute(tensor, method), args=[]) if (
                method in READ_METHODS and not dotted
            ):
                return tensor
            case ast.Call(func=function, args=[value]) if dotted.startswith("math.") or (
                getattr(function, "id", "") in CASTS and not source.bindings(function)
            ):
                return value
            case ast.Call(func=ast.Attribute()):
                return next((k.value for k in node.keywords if k.arg in ("alpha", "value")), None)
        return None
    parent = source.parent(node)
    if isinstance(parent, (ast.If, ast.While, ast.IfExp)) and node is parent.test:
        test = parent.test
        return test.operand if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not) else test
    return None


def _runs_rarely(source: SourceFile, node: ast.AST, function: ast.AST) -> bool:
    """Whether a node is in an error, or in an arm for debugging or for one step in many."""
    child = node
    for parent in source.parents(node):
        if parent is function:
            return False
        if isinstance(parent, (ast.Raise, ast.Assert, ast.ExceptHandler)):
            return True
        if isinstance(parent, (ast.If, ast.IfExp)) and child is not parent.test:
            first = "len(state) == 0" in ast.unparse(parent.test) or "not state" in ast.unparse(parent.test)
            if first or mentions(parent.test, (*SWITCHES, *COUNTS, "not in", "sparse")):
                return True
        child = parent
    return False
