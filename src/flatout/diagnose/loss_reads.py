"""Reads of the device inside loss functions: they run in each step, wherever the training loop is."""

import ast
from collections.abc import Iterator

from flatout.probe.each_step import called
from flatout.probe.kinds import MAKES_TENSORS
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import SWITCHES, mentions

REDUCTIONS = {"sum", "max", "min", "mean", "norm", "count_nonzero", "nonzero"}
LOSS_WORDS = ("loss", "criterion")


def loss_reads(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.expr, str]]:
    """Yield the reads of loss functions, with a rewrite that needs no read.

    A read for a size, as in ``int(lengths.max())``, has none."""
    for source, function in _loss_functions(program):
        for node in ast.walk(function):
            if source.function(node) is not function or _runs_rarely(source, node, function):
                continue
            if isinstance(node, (ast.If, ast.IfExp)) and (tensor := _tested_tensor(node.test)) is not None:
                if _is_tensor(source, function, tensor) and not _selects(function, node, tensor):
                    name = source.code(tensor)
                    yield (
                        source,
                        node.test,
                        f"without a read: torch.where, or {name}.sum().clamp(min=1) as divisor",
                    )
            elif (
                isinstance(node, ast.Call)
                and (reduction := _reduction_read(node)) is not None
                and isinstance(source.parent(node), ast.BinOp)
                and isinstance(reduction.func, ast.Attribute)
                and _is_tensor(source, function, reduction.func.value)
            ):
                yield source, node, f"{source.code(reduction)}.detach()  # stays on the device"


def _loss_functions(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.AST]]:
    """Yield the methods that an instance of a class with such a name runs when it is called."""
    queue = [
        (source, method)
        for source in program.sources
        for klass in source.classes
        if any(word in klass.name.lower() for word in LOSS_WORDS)
        for method in klass.body
        if isinstance(method, FUNCTIONS) and method.name in ("forward", "__call__")
    ]
    visited: set[int] = set()
    while queue:
        source, function = queue.pop(0)
        if id(function) not in visited:
            visited.add(id(function))
            yield source, function
            queue += [
                (home, callee)
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
                for home, callee in called(program, source, node)
                if isinstance(callee, FUNCTIONS)
            ]


def _runs_rarely(source: SourceFile, node: ast.AST, function: ast.AST) -> bool:
    """Whether a node is in an arm for debugging or evaluation."""
    return isinstance(source.statement(node), ast.Assert) or any(
        mentions(parent.test, (*SWITCHES, "training", "log", "random", "%"))
        for parent in source.parents(node)
        if isinstance(parent, (ast.If, ast.IfExp)) and source.function(parent) is function
    )


def _tested_tensor(test: ast.expr) -> ast.expr | None:
    """The tensor ``x`` of a test ``x.sum() > 0``, ``x.any()`` or ``x.max() == 0``."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test = test.operand
    match test:
        case ast.Compare(
            left=ast.Call(func=ast.Attribute(tensor, name), args=[]), comparators=[ast.Constant(), *_]
        ) if name in REDUCTIONS:
            return tensor
        case ast.Call(func=ast.Attribute(tensor, "any" | "all"), args=[]):
            return tensor
    return None


def _selects(function: ast.AST, guard: ast.AST, mask: ast.expr) -> bool:
    """Whether entries are selected by the mask, or by a mask in the arm: that waits in any case."""
    return any(
        isinstance(node, ast.Subscript)
        and any(
            isinstance(part, ast.expr) and ast.dump(part) == ast.dump(mask) for part in ast.walk(node.slice)
        )
        for node in ast.walk(function)
    ) or any(
        isinstance(node, ast.Subscript) and isinstance(node.slice, (ast.Name, ast.Compare))
        for node in ast.walk(guard)
    )


def _reduction_read(call: ast.Call) -> ast.Call | None:
    """Return ``x.sum()`` of ``x.sum().item()`` or ``float(x.sum())``."""
    match call:
        case (
            ast.Call(func=ast.Attribute(ast.Call() as reduction, "item"), args=[])
            | ast.Call(func=ast.Name("float"), args=[ast.Call() as reduction])
        ) if isinstance(reduction.func, ast.Attribute) and reduction.func.attr in REDUCTIONS:
            return reduction
    return None


def _is_tensor(source: SourceFile, function: ast.AST, node: ast.expr, depth: int = 0) -> bool:
    """Whether a value is computed by tensor operations from the parameters of the function."""
    if depth > 6:
        return False
    match node:
        case ast.Compare(left=inner) | ast.UnaryOp(operand=inner) | ast.Subscript(value=inner):
            return _is_tensor(source, function, inner, depth + 1)
        case ast.BinOp(left, _, right):
            return any(_is_tensor(source, function, side, depth + 1) for side in (left, right))
        case ast.Call(func):
            dotted = source.dotted(func)
            if dotted:
                return dotted.startswith("torch.")
            return (
                isinstance(func, ast.Attribute)
                and func.attr not in ("size", "dim", "numel", "numpy", "tolist", "item", "cpu")
                and _is_tensor(source, function, func.value, depth + 1)
            )
    if not isinstance(node, ast.Name):
        return False
    bindings = source.names.reaching(node)
    return bool(bindings) and all(
        _is_tensor_parameter(source, function, node, binding.node)
        if binding.how == "parameter"
        else binding.how == "assign"
        and binding.value is not None
        and not binding.path
        and _is_tensor(source, function, binding.value, depth + 1)
        for binding in bindings
    )


def _is_tensor_parameter(source: SourceFile, function: ast.AST, node: ast.Name, parameter: ast.AST) -> bool:
    """Whether a parameter is a tensor: torch's functions use it, or its annotation says so."""
    annotation = getattr(parameter, "annotation", None)
    if annotation is not None:
        return "Tensor" in ast.unparse(annotation)
    return any(
        isinstance(call, ast.Call)
        and source.dotted(call.func).startswith("torch.")
        and source.dotted(call.func).rpartition(".")[2] not in MAKES_TENSORS - {"cat", "stack", "where"}
        and any(node.id in _operands(argument) for argument in call.args)
        for call in ast.walk(function)
    )


def _operands(node: ast.expr) -> set[str]:
    if isinstance(node, ast.BinOp):
        return _operands(node.left) | _operands(node.right)
    return {node.id} if isinstance(node, ast.Name) else set()
