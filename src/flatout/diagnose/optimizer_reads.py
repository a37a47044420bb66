"""Reads of the device in the ``step`` of the program's own optimizers: it runs in each training step."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.probe.device_values import on_device
from flatout.probe.each_step import called
from flatout.probe.names import COMPREHENSIONS, FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import COUNTS, SWITCHES, mentions

METHODS = {"item", "tolist", "cpu", "numpy", "nonzero"}
CASTS = {"float", "int", "bool"}
LOOPS = (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)


def optimizer_reads(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.expr, ast.expr, bool]]:
    """Yield each read with the tensor, and whether it happens for each parameter."""
    for home, klass in optimizers_defined(program):
        functions = list(_of_step(program, home, klass))
        if any(_minimises(source, function) for source, function, _ in functions):
            continue  # a search along a line decides by the value of the loss
        for source, function, in_loop in functions:
            statements: set[int] = set()
            for node in ast.walk(function):
                tensor = _read(source, node)
                statement = source.statement(node)
                if (
                    tensor is None
                    or id(statement) in statements
                    or source.function(node) is not function
                    or not on_device(source, tensor)
                    or _rarely(source, node, function)
                ):
                    continue
                statements.add(id(statement))
                looped = in_loop or any(
                    isinstance(each, LOOPS)
                    for each in source.parents(node)
                    if source.function(each) is function
                )
                assert isinstance(node, ast.expr)
                yield source, node, tensor, looped


def optimizers_defined(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.ClassDef]]:
    """Yield the program's own subclasses of torch's optimizers."""
    for source in program.sources:
        for klass in source.classes:
            bases = program.values.bases(source, klass)
            if any(base.startswith("torch.optim.") and "lr_scheduler" not in base for base in bases):
                yield source, klass


def _of_step(
    program: ScriptProgram, source: SourceFile, klass: ast.ClassDef
) -> Iterator[tuple[SourceFile, ast.AST, bool]]:
    """Yield the step of an optimizer and the functions that it calls, and whether a loop is around the call."""
    waiting = [(home, each, False) for home, each in program.methods(source, klass, "step")]
    seen: set[int] = set()
    while waiting:
        home, function, in_loop = waiting.pop(0)
        if id(function) in seen or not isinstance(function, FUNCTIONS):
            continue
        seen.add(id(function))
        yield home, function, in_loop
        for node in ast.walk(function):
            if (
                isinstance(node, ast.Call)
                and home.function(node) is function
                and not _rarely(home, node, function)
            ):
                looped = in_loop or any(isinstance(each, LOOPS) for each in home.parents(node))
                waiting += [(there, each, looped) for there, each in called(program, home, node)]


def _minimises(source: SourceFile, function: ast.AST) -> bool:
    """Return whether a loop evaluates the closure again and again."""
    return any(
        isinstance(node, ast.Call)
        and "closure" in (getattr(node.func, "id", ""), getattr(node.func, "attr", ""))
        and any(isinstance(each, (ast.For, ast.While)) for each in source.parents(node))
        for node in ast.walk(function)
    )


def _read(source: SourceFile, node: ast.AST) -> ast.expr | None:
    """Return the tensor whose value a node fetches: by a method, a conversion, or as a condition."""
    if isinstance(node, ast.Call):
        dotted = source.dotted(node.func)
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr in METHODS
            and not node.args
            and not dotted
        ):
            return node.func.value
        named = getattr(node.func, "id", "") in CASTS and not source.bindings(node.func)
        if (named or dotted.startswith("math.")) and len(node.args) == 1:
            return node.args[0]
        return next(
            (
                k.value
                for k in node.keywords
                if k.arg in ("alpha", "value") and isinstance(node.func, ast.Attribute)
            ),
            None,
        )
    parent = source.parent(node)
    if (
        isinstance(parent, (ast.If, ast.While, ast.IfExp))
        and node is parent.test
        and isinstance(node, ast.expr)
    ):
        return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) else node
    return None


def _rarely(source: SourceFile, node: ast.AST, function: ast.AST) -> bool:
    """Return whether a node is in an error, or in an arm for debugging or for one step in many."""
    child = node
    for each in source.parents(node):
        if each is function:
            return False
        if isinstance(each, (ast.Raise, ast.Assert, ast.ExceptHandler)):
            return True
        if isinstance(each, (ast.If, ast.IfExp)) and child is not each.test:
            first = "len(state) == 0" in ast.unparse(each.test) or "not state" in ast.unparse(each.test)
            if first or mentions(each.test, (*SWITCHES, *COUNTS, "not in", "sparse")):
                return True
        child = each
    return False
