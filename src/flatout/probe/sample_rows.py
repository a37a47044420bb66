"""Which part of a file that was read for a sample is kept: the row that the sample's index names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.probe.sample_reads import LAZY, Chain, FileRead, path_of
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import argument

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

# Expressions that pass an array on, and attributes of one.
SAME = {
    "numpy.array",
    "numpy.asarray",
    "torch.tensor",
    "torch.as_tensor",
    "torch.from_numpy",
    "SimpleITK.GetArrayFromImage",
}
KEEPING = {"astype", "get_fdata", "numpy", "float", "long", "to_numpy", "to", "copy", "tolist", "decode"}
PARTS = {"values", "iloc", "loc", "T"}
INDEXES = {"int", "divmod", "min", "max", "numpy.searchsorted", "bisect.bisect", "bisect.bisect_right", "str"}


def row_of(program: ScriptProgram, read: FileRead) -> ast.expr | None:
    """Return the index of the sample by which a program keeps one part of what it has read, or None."""
    source, node = read.source, read.call
    path = path_of(source, node) if isinstance(node, ast.Call) else node
    leaves = _leaves(path) if path is not None else set()
    lazy = isinstance(node, ast.Call) and source.dotted(node.func) in LAZY
    for use, where, around in _uses(program, source, node, read.chain, not lazy):
        for part in use.slice.elts if isinstance(use.slice, ast.Tuple) else [use.slice]:
            row = part.lower if isinstance(part, ast.Slice) else part
            if row is None or isinstance(row, (ast.Compare, ast.Constant, ast.List)):
                continue
            if _leaves(row) & leaves or not _of_sample(program, where, row, read, around):
                continue
            return row
    return None


def _leaves(node: ast.expr) -> set[str]:
    """Return the names and entries in an expression as text, without what contains them."""
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript)):
        return {ast.unparse(node)} - {"self"}
    return {
        leaf for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr) for leaf in _leaves(each)
    }


def _uses(
    program: ScriptProgram, source: SourceFile, node: ast.expr, chain: Chain, read: bool, depth: int = 0
) -> Iterator[tuple[ast.Subscript, SourceFile, Chain]]:
    """Yield the subscripts of what a call has read, through names, entries by a text, and the function's result."""
    above = source.parent(node)
    if depth > 8 or above is None:
        return
    if isinstance(above, ast.Subscript) and above.value is node:
        constant = isinstance(above.slice, ast.Constant) or not read
        if not constant:
            yield above, source, chain
        yield from _uses(program, source, above, chain, read, depth + 1)
    elif isinstance(above, ast.Attribute):
        outer = source.parent(above)
        if above.attr in PARTS:
            yield from _uses(program, source, above, chain, read, depth + 1)
        elif above.attr in KEEPING and isinstance(outer, ast.Call):
            yield from _uses(program, source, outer, chain, True, depth + 1)
    elif isinstance(above, ast.Call) and node in above.args and source.dotted(above.func) in SAME:
        yield from _uses(program, source, above, chain, read, depth + 1)
    elif isinstance(above, ast.Assign) and above.value is node and isinstance(above.targets[0], ast.Name):
        name = above.targets[0].id
        function = source.function(node) or source.tree
        names = [
            each
            for each in ast.walk(function)
            if isinstance(each, ast.Name)
            and each.id == name
            and isinstance(each.ctx, ast.Load)
            and any(binding.node is above for binding in source.names.reaching(each))
        ]
        parents = [source.parent(each) for each in names]
        if all(isinstance(each, (ast.Subscript, ast.Attribute)) or _only_asks(each) for each in parents):
            for each in names:
                yield from _uses(program, source, each, chain, read, depth + 1)
    elif isinstance(above, ast.Return) and chain:
        caller, call = chain[-1]
        yield from _uses(program, caller, call, chain[:-1], read, depth + 1)


def _only_asks(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
        "len",
        "print",
        "isinstance",
        "type",
    )


def _of_sample(
    program: ScriptProgram, source: SourceFile, node: ast.expr, read: FileRead, chain: Chain, depth: int = 0
) -> bool:
    """Return whether an index depends on the sample's index, not on what was read for it."""
    if depth > 8:
        return False
    again = lambda each: _of_sample(program, source, each, read, chain, depth + 1)  # noqa: E731
    if isinstance(node, ast.BinOp):
        return again(node.left) or again(node.right)
    if isinstance(node, ast.UnaryOp):
        return again(node.operand)
    if isinstance(node, ast.Subscript):
        return again(node.value) or again(node.slice)
    if isinstance(node, ast.Attribute):
        return getattr(node.value, "id", "") != "self" and again(node.value)
    if isinstance(node, ast.Call):
        name = source.dotted(node.func) or getattr(node.func, "id", "")
        return name in INDEXES and any(again(each) for each in node.args)
    if not isinstance(node, ast.Name):
        return False
    bindings = source.names.reaching(node)
    if len(bindings) != 1:
        return False
    binding = bindings[0]
    if binding.how == "assign" and binding.value is not None:
        return again(binding.value)
    function = source.function(node)
    if binding.how != "parameter" or function is None:
        return False
    if function is read.entry:
        return binding.node is not function.args.args[0]
    if not chain:
        return False
    caller, call = chain[-1]
    handed = argument(source, function, binding.node, call)
    return handed is not None and _of_sample(program, caller, handed, read, chain[:-1], depth + 1)
