"""Reads of the device inside loss functions: they run in each step, wherever the training loop is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.probe.each_step import called
from flatout.probe.kinds import MAKES_TENSORS
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import SWITCHES, mentions

REDUCE = {"sum", "max", "min", "mean", "norm", "count_nonzero", "nonzero"}
WORDS = ("loss", "criterion")


def loss_reads(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.expr, str]]:
    """Yield the reads of loss functions, with a rewrite that needs no read.

    A read for a size, as in ``int(lengths.max())``, has none.
    """
    for source, function in _losses(program):
        for node in ast.walk(function):
            if source.function(node) is not function or _rarely(source, node, function):
                continue
            if isinstance(node, (ast.If, ast.IfExp)) and (reduced := _asked(node.test)) is not None:
                if _is_tensor(source, function, reduced) and not _selects(function, node, reduced):
                    name = source.code(reduced)
                    yield (
                        source,
                        node.test,
                        f"without a read: torch.where, or {name}.sum().clamp(min=1) as divisor",
                    )
            elif (
                isinstance(node, ast.Call)
                and (read := _item(node)) is not None
                and isinstance(source.parent(node), ast.BinOp)
                and isinstance(read.func, ast.Attribute)
                and _is_tensor(source, function, read.func.value)
            ):
                yield source, node, f"{source.code(read)}.detach()  # stays on the device"


def _losses(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.AST]]:
    """Yield the methods that an instance of a class named so runs when it is called."""
    waiting = [
        (source, method)
        for source in program.sources
        for klass in source.classes
        if any(word in klass.name.lower() for word in WORDS)
        for method in klass.body
        if isinstance(method, FUNCTIONS) and method.name in ("forward", "__call__")
    ]
    seen: set[int] = set()
    while waiting:
        source, function = waiting.pop(0)
        if id(function) not in seen:
            seen.add(id(function))
            yield source, function
            waiting += [
                (home, each)
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
                for home, each in called(program, source, node)
                if isinstance(each, FUNCTIONS)
            ]


def _rarely(source: SourceFile, node: ast.AST, function: ast.AST) -> bool:
    """Return whether a node is in an arm for debugging or evaluation."""
    return isinstance(source.statement(node), ast.Assert) or any(
        mentions(each.test, (*SWITCHES, "training", "log", "random", "%"))
        for each in source.parents(node)
        if isinstance(each, (ast.If, ast.IfExp)) and source.function(each) is function
    )


def _asked(test: ast.expr) -> ast.expr | None:
    """Return the tensor of which a test asks ``x.sum() > 0``, ``x.any()`` or ``torch.sum(x) == 0``."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    if isinstance(test, ast.Compare) and isinstance(test.comparators[0], ast.Constant):
        call = test.left
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in REDUCE:
            return call.func.value if not call.args else None
    if isinstance(test, ast.Call) and isinstance(test.func, ast.Attribute) and not test.args:
        return test.func.value if test.func.attr in ("any", "all") else None
    return None


def _selects(function: ast.AST, guard: ast.AST, mask: ast.expr) -> bool:
    """Return whether entries are selected by the mask, or by a mask in the arm: that waits in any case."""
    by_mask = any(
        isinstance(node, ast.Subscript)
        and any(
            isinstance(each, ast.expr) and ast.dump(each) == ast.dump(mask) for each in ast.walk(node.slice)
        )
        for node in ast.walk(function)
    )
    return by_mask or any(
        isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Name, ast.Compare))
        for node in ast.walk(guard)
    )


def _item(call: ast.Call) -> ast.Call | None:
    """Return ``x.sum()`` of ``x.sum().item()`` or ``float(x.sum())``."""
    read: ast.expr | None = None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args:
        read = call.func.value
    elif isinstance(call.func, ast.Name) and call.func.id == "float" and len(call.args) == 1:
        read = call.args[0]
    if isinstance(read, ast.Call) and isinstance(read.func, ast.Attribute) and read.func.attr in REDUCE:
        return read
    return None


def _is_tensor(source: SourceFile, function: ast.AST, node: ast.expr, depth: int = 0) -> bool:
    """Return whether a value is computed by tensor operations from the parameters of the function."""
    if depth > 6:
        return False
    if isinstance(node, ast.Compare):
        return _is_tensor(source, function, node.left, depth + 1)
    if isinstance(node, ast.BinOp):
        return _is_tensor(source, function, node.left, depth + 1) or _is_tensor(
            source, function, node.right, depth + 1
        )
    if isinstance(node, (ast.UnaryOp, ast.Subscript)):
        inner = node.operand if isinstance(node, ast.UnaryOp) else node.value
        return _is_tensor(source, function, inner, depth + 1)
    if isinstance(node, ast.Call):
        dotted = source.dotted(node.func)
        if dotted:
            return dotted.startswith("torch.")
        return (
            isinstance(node.func, ast.Attribute)
            and node.func.attr not in ("size", "dim", "numel", "numpy", "tolist", "item", "cpu")
            and _is_tensor(source, function, node.func.value, depth + 1)
        )
    if not isinstance(node, ast.Name):
        return False
    bindings = source.names.reaching(node)
    return bool(bindings) and all(
        _given(source, function, node, binding.node)
        if binding.how == "parameter"
        else binding.how == "assign"
        and binding.value is not None
        and not binding.path
        and _is_tensor(source, function, binding.value, depth + 1)
        for binding in bindings
    )


def _given(source: SourceFile, function: ast.AST, node: ast.Name, parameter: ast.AST) -> bool:
    """Return whether a parameter is a tensor: torch's functions use it, or its annotation says so."""
    note = getattr(parameter, "annotation", None)
    if note is not None:
        return "Tensor" in ast.unparse(note)
    return any(
        isinstance(call, ast.Call)
        and source.dotted(call.func).startswith("torch.")
        and source.dotted(call.func).rpartition(".")[2] not in MAKES_TENSORS - {"cat", "stack", "where"}
        and any(node.id in _operands(each) for each in call.args)
        for call in ast.walk(function)
    )


def _operands(node: ast.expr) -> set[str]:
    if isinstance(node, ast.BinOp):
        return _operands(node.left) | _operands(node.right)
    return {node.id} if isinstance(node, ast.Name) else set()
