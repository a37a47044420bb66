"""How many dimensions a tensor has, where the source shows it: a view, a flatten, or sizes that are unpacked."""

import ast

from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile

MAX_DEPTH = 20  # names and calls to follow
KEEP_DIMENSIONS = {
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "gelu",
    "silu",
    "dropout",
    "sigmoid",
    "tanh",
    "clone",
    "contiguous",
    "detach",
    "float",
    "linear",
}
FACTORIES = {"rand", "randn", "zeros", "ones", "empty"}
KEEPING_LAYERS = {
    "Linear",
    "Dropout",
    "ReLU",
    "LeakyReLU",
    "ELU",
    "SELU",
    "GELU",
    "SiLU",
    "Tanh",
    "Sigmoid",
    "LayerNorm",
    "BatchNorm1d",
}


def dimensions(program: ScriptProgram, source: SourceFile, node: ast.expr, depth: int = 0) -> int | None:
    """The number, or None if the source does not show it."""
    if depth > MAX_DEPTH:
        return None
    if isinstance(node, ast.Name):
        return _dimensions_of_name(program, source, node, depth)
    if not isinstance(node, ast.Call):
        return None
    func, dotted = node.func, source.dotted(node.func)
    if dotted.startswith("torch."):
        name, values = dotted.rpartition(".")[2], node.args
    elif (
        isinstance(func, ast.Attribute)
        and not dotted
        and func.attr in KEEP_DIMENSIONS | {"view", "reshape", "flatten"}
    ):
        name, values = func.attr, [func.value, *node.args]
    elif (program.values.kinds(source, func) - {"Module"} or {""}) <= KEEPING_LAYERS and len(node.args) == 1:
        return dimensions(program, source, node.args[0], depth + 1)
    else:
        return None
    if name in KEEP_DIMENSIONS and values:
        return dimensions(program, source, values[0], depth + 1)
    if name == "flatten" and len(values) == 2 and getattr(values[1], "value", None) == 1:
        return 2
    if name in ("view", "reshape") and not node.keywords:
        return _sizes_given(values[1:])
    return _sizes_given(node.args) if name in FACTORIES and dotted else None


def _sizes_given(sizes: list[ast.expr]) -> int | None:
    """The number of sizes. A single one may be a tuple, or a type."""
    match sizes:
        case [ast.Tuple(elts=elements) | ast.List(elts=elements)]:
            sizes = elements
        case [ast.UnaryOp() | ast.Constant()]:
            pass
        case [_]:
            return None
    return None if any(isinstance(size, ast.Starred) for size in sizes) else len(sizes)


def _dimensions_of_name(program: ScriptProgram, source: SourceFile, node: ast.Name, depth: int) -> int | None:
    bindings = source.names.reaching(node)
    if len(bindings) != 1:
        return None
    binding = bindings[0]
    if binding.how == "assign" and binding.value is not None and not binding.path:
        return dimensions(program, source, binding.value, depth + 1)
    return _sizes_unpacked(source, node) if binding.how == "parameter" else None


def _sizes_unpacked(source: SourceFile, node: ast.Name) -> int | None:
    """The number of names that take the sizes of a parameter: ``n, c, h, w = x.size()``."""
    scope = source.function(node)
    if scope is None or len(source.names.lookup(node)) != 1:
        return None
    sizes = (f"{node.id}.size()", f"{node.id}.shape")
    for statement in scope.body:
        match statement:
            case ast.Assign([ast.Tuple(names), *_], value) if source.code(value) in sizes:
                if statement.lineno <= node.lineno:
                    return None if any(isinstance(name, ast.Starred) for name in names) else len(names)
    return None
