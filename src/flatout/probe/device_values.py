"""Values that an optimizer surely computes on the device: from parameters, gradients and their state."""

import ast

from flatout.probe.kinds import MAKES_TENSORS
from flatout.probe.script import SourceFile

DEEP = 10
ON_HOST = {
    *("size", "dim", "numel", "nelement", "ndimension", "item", "tolist", "cpu", "numpy", "get", "stride"),
    *(
        "is_contiguous",
        "is_floating_point",
        "is_complex",
        "element_size",
        "get_device",
        "type",
        "keys",
        "values",
    ),
}
HOST_FUNCTIONS = {"is_tensor", "is_complex", "is_floating_point", "numel", "device", "finfo", "iinfo", "Size"}
# Torch keeps the count of steps and the learning rate on the host, unless a program moves them.
KEPT_ON_HOST = ("step", "lr", "beta", "iter", "count", "epoch", "group", "eps", "decay")


def on_device(source: SourceFile, node: ast.AST, depth: int = 0) -> bool:
    """Return whether a value in a method of an optimizer is a tensor beside the parameters."""
    if depth > DEEP:
        return False
    if isinstance(node, ast.Attribute):
        if node.attr == "grad":
            return True
        return node.attr in ("data", "T", "mT", "real") and on_device(source, node.value, depth + 1)
    if isinstance(node, ast.BinOp):
        return any(on_device(source, each, depth + 1) for each in (node.left, node.right))
    if isinstance(node, ast.Compare):
        tested = [node.left, *node.comparators]
        by_value = all(
            isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)) for op in node.ops
        )
        return by_value and any(on_device(source, each, depth + 1) for each in tested)
    if isinstance(node, ast.UnaryOp):
        return not isinstance(node.op, ast.Not) and on_device(source, node.operand, depth + 1)
    if isinstance(node, ast.IfExp):
        return all(on_device(source, each, depth + 1) for each in (node.body, node.orelse))
    if isinstance(node, ast.Subscript):
        return on_device(source, node.value, depth + 1) or _of_state(source, node, depth)
    if isinstance(node, ast.Call):
        return _call(source, node, depth)
    return isinstance(node, ast.Name) and _name(source, node, depth)


def _call(source: SourceFile, call: ast.Call, depth: int) -> bool:
    dotted = source.dotted(call.func)
    name = dotted.rpartition(".")[2]
    if dotted:
        if not dotted.startswith("torch.") or name in HOST_FUNCTIONS:
            return False
        placed = any(k.arg == "device" and "cpu" not in ast.unparse(k.value) for k in call.keywords)
        if name in MAKES_TENSORS and placed:
            return True
        return any(on_device(source, each, depth + 1) for each in _given(call))
    if not isinstance(call.func, ast.Attribute) or call.func.attr in ON_HOST or _to_host(call):
        return False
    return on_device(source, call.func.value, depth + 1)


def _given(call: ast.Call) -> list[ast.expr]:
    first = call.args[:2]
    return [
        part for each in first for part in (each.elts if isinstance(each, (ast.List, ast.Tuple)) else [each])
    ]


def _to_host(call: ast.Call) -> bool:
    given = [*call.args, *(k.value for k in call.keywords)]
    return (
        isinstance(call.func, ast.Attribute)
        and call.func.attr == "to"
        and any("cpu" in ast.unparse(each) for each in given)
    )


def _name(source: SourceFile, node: ast.Name, depth: int) -> bool:
    bindings = source.names.reaching(node)
    return bool(bindings) and all(
        _is_parameter(source, node)
        if binding.how in ("for", "parameter")
        else binding.how in ("assign", "augment") and _at(source, binding.value, binding.path, depth)
        for binding in bindings
    )


def _at(source: SourceFile, value: ast.expr | None, path: tuple[int, ...], depth: int) -> bool:
    """Return whether a value, or its entry at a path, is a tensor: ``s, p0 = state["s"], state["p0"]``."""
    while path and isinstance(value, (ast.Tuple, ast.List)) and path[0] < len(value.elts):
        value, path = value.elts[path[0]], path[1:]
    return value is not None and not path and on_device(source, value, depth + 1)


def _is_parameter(source: SourceFile, node: ast.Name) -> bool:
    """Return whether a loop variable or an argument is a parameter: its gradient is read in the function."""
    function = source.function(node)
    return function is not None and any(
        isinstance(each, ast.Attribute)
        and each.attr == "grad"
        and isinstance(each.value, ast.Name)
        and each.value.id == node.id
        for each in ast.walk(function)
    )


def _of_state(source: SourceFile, node: ast.Subscript, depth: int) -> bool:
    """Return whether this is an entry of the state of a parameter that the class fills with tensors like it."""
    key = node.slice.value if isinstance(node.slice, ast.Constant) else None
    klass = source.klass(node)
    if not isinstance(key, str) or klass is None or any(word in key for word in KEPT_ON_HOST):
        return False
    values = [
        each.value
        for each in ast.walk(klass)
        if isinstance(each, ast.Assign)
        and any(
            isinstance(target, ast.Subscript)
            and isinstance(target.slice, ast.Constant)
            and target.slice.value == key
            and "state" in ast.unparse(target.value)
            for target in each.targets
        )
    ]
    return bool(values) and all(on_device(source, each, depth + 2) for each in values)
