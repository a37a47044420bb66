"""Small questions about expressions of a script."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.probe.names import FUNCTIONS

if TYPE_CHECKING:
    from flatout.probe.script import SourceFile


def iterated(node: ast.expr) -> ast.expr:
    """Return the iterable behind wrappers: ``loader`` in ``enumerate(tqdm(loader), 1)``."""
    while isinstance(node, ast.Call) and node.args:
        name = (
            node.func.id
            if isinstance(node.func, ast.Name)
            else node.func.attr
            if isinstance(node.func, ast.Attribute)
            else ""
        )
        if name not in ("enumerate", "tqdm", "trange", "iter", "islice", "track", "prange", "progress_bar"):
            break
        node = node.args[0]
    return node


def is_given(call: ast.Call, name: str, value: object) -> bool:
    """Return whether a call has this constant as a keyword."""
    return any(
        k.arg == name and isinstance(k.value, ast.Constant) and k.value.value is value for k in call.keywords
    )


def returns(function: ast.AST) -> list[ast.expr]:
    """Return the expressions of a function's own return statements."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    found, waiting = [], list(getattr(function, "body", []))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            found.append(node.value)
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Lambda)):
            waiting += [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case))
            ]
    return found


def is_static(function: ast.AST) -> bool:
    return any(
        isinstance(d, ast.Name) and d.id == "staticmethod" for d in getattr(function, "decorator_list", [])
    )


def argument(source: SourceFile, function: ast.AST, parameter: ast.AST, call: ast.Call) -> ast.expr | None:
    """Return what a call passes for a parameter of a function, or None if that is not visible."""
    if not isinstance(function, (*FUNCTIONS, ast.Lambda)) or not isinstance(parameter, ast.arg):
        return None
    arguments = function.args
    names = [each.arg for each in [*arguments.posonlyargs, *arguments.args]]
    if parameter.arg not in [*names, *(each.arg for each in arguments.kwonlyargs)]:
        return None
    named = next((k.value for k in call.keywords if k.arg == parameter.arg), None)
    if named is not None or parameter.arg not in names:
        return named
    method = isinstance(source.parent(function), ast.ClassDef) and not is_static(function)
    position = names.index(parameter.arg) - method
    if any(isinstance(each, ast.Starred) for each in call.args) or not 0 <= position < len(call.args):
        return None
    return call.args[position]


def annotated(parameter: ast.arg) -> list[ast.expr]:
    """Return the types in the annotation of a parameter: ``X`` of ``X``, ``X | None`` and ``Optional[X]``."""
    waiting, found = [parameter.annotation], []
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.BinOp):
            waiting += [node.left, node.right]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value).rpartition(".")[2] == "Optional":
            waiting.append(node.slice)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            found.append(node)
    return found  # type: ignore[return-value]


def default_of(function: ast.AST | None, parameter: ast.AST) -> ast.expr | None:
    """Return the default of a parameter, or None if it has none."""
    if not isinstance(function, (*FUNCTIONS, ast.Lambda)):
        return None
    places = [*function.args.posonlyargs, *function.args.args]
    first = len(places) - len(function.args.defaults)
    pairs = [
        *zip(places[first:], function.args.defaults, strict=True),
        *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True),
    ]
    return next((default for each, default in pairs if each is parameter), None)


def flat(targets: list[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, (ast.Tuple, ast.List)):
            yield from flat(target.elts)
        else:
            yield target


def dotted_path(statement: ast.Assign | ast.AnnAssign, attribute: str) -> tuple[int, ...]:
    for target in statement.targets if isinstance(statement, ast.Assign) else [statement.target]:
        if isinstance(target, (ast.Tuple, ast.List)):
            for index, each in enumerate(target.elts):
                if isinstance(each, ast.Attribute) and each.attr == attribute:
                    return (index,)
    return ()


def of_one_class(source: SourceFile, one: ast.AST, other: ast.AST) -> bool:
    """Return whether two expressions that read alike are one attribute of ``self``, in methods of one class."""
    owned = isinstance(one, ast.Attribute) and getattr(one.value, "id", "") == "self"
    return owned and source.klass(one) is source.klass(other)
