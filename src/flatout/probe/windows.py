"""Conditions on the number of a micro-batch: ``(i + 1) % n == 0`` holds once in n passes."""

import ast
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from flatout.probe.script import SourceFile

ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.Gt: operator.gt,
    ast.LtE: operator.le,
    ast.GtE: operator.ge,
}


@dataclass(frozen=True)
class Window:
    """A condition on ``index`` and ``size``, both by the last part of their names. ``size`` may be a number.

    ``positive`` is whether the condition is the test itself, not its opposite.
    """

    index: str
    size: str
    test: ast.expr
    positive: bool

    @property
    def sizes(self) -> Sequence[int]:
        """Return the numbers of micro-batches to try: the one in the source, or a few."""
        return [int(self.size)] if self.size.isdigit() else range(2, 6)

    def holds(self, index: int, size: int) -> bool:
        """Return whether it holds in this pass. A size that the source writes as a number stays that number."""
        return bool(_value(self.test, {self.index: index, self.size: size})) is self.positive


def resolved(source: SourceFile, test: ast.expr) -> ast.expr:
    """Return a test with the names of conditions replaced: ``last = (i + 1) % n == 0`` and then ``if last:``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return ast.copy_location(ast.UnaryOp(test.op, resolved(source, test.operand)), test)
    if isinstance(test, ast.BoolOp):
        return ast.copy_location(
            ast.BoolOp(test.op, [resolved(source, value) for value in test.values]), test
        )
    bindings = source.names.reaching(test) if isinstance(test, ast.Name) else []
    value = bindings[0].value if len(bindings) == 1 and bindings[0].how == "assign" else None
    if isinstance(value, (ast.Compare, ast.BoolOp, ast.UnaryOp)) and not bindings[0].path:
        return value
    return test


def counts(test: ast.expr) -> bool:
    """Return whether a test has a modulo."""
    return any(isinstance(each, ast.Mod) for each in ast.walk(test))


def size_of(test: ast.expr) -> str:
    """Return the source of ``n`` in a test with ``% n``."""
    return ast.unparse(_modulos(test)[0].right)


def _modulos(test: ast.expr) -> list[ast.BinOp]:
    return [node for node in ast.walk(test) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)]


def window_of(test: ast.expr) -> Window | None:
    """Return the condition of the only modulo in a test that holds, or None."""
    modulos = _modulos(test)
    size = last_name(modulos[0].right) if len(modulos) == 1 else ""
    names = set(_names(modulos[0].left)) - {"", size} if size else set()
    return condition(test, True, names.pop(), size) if len(names) == 1 else None


def condition(test: ast.expr, holds: bool, index: str, size: str) -> Window | None:
    """Return the only condition on these two numbers in a test that has this value, or None.

    Other conditions beside it are taken to allow it: ``distributed and i % n != 0``.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return condition(test.operand, not holds, index, size)
    if isinstance(test, ast.BoolOp):
        found = [each for value in test.values if (each := condition(value, holds, index, size)) is not None]
        return found[0] if len(found) == 1 else None
    return Window(index, size, test, holds) if _value(test, {index: 1, size: 2}) is not None else None


def last_name(node: ast.AST) -> str:
    """Return ``steps`` of ``self.config.steps`` and of ``state["steps"]``, ``len(x)``, or the digits of a number.

    Anything else has the name "".
    """
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, int) else ""
    if isinstance(node, ast.Subscript):
        return str(getattr(node.slice, "value", "")) if isinstance(node.slice, ast.Constant) else ""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len" and node.args:
        return f"len({last_name(node.args[0])})"
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.expr) -> Iterator[str]:
    """Yield the names of the values in a calculation."""
    if isinstance(node, ast.BinOp):
        yield from _names(node.left)
        yield from _names(node.right)
    elif not isinstance(node, ast.Constant):
        yield last_name(node) or ast.unparse(node)


def _value(node: ast.expr, known: dict[str, int]) -> int | None:
    """Return the value of an expression of whole numbers, or None if a part is unknown."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if isinstance(node, (ast.Name, ast.Attribute, ast.Subscript, ast.Call)):
        return known.get(last_name(node))
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        left, right = _value(node.left, known), _value(node.right, known)
        if left is None or right is None or (right == 0 and isinstance(node.op, ast.Mod)):
            return None
        return ARITHMETIC[type(node.op)](left, right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        left, right = _value(node.left, known), _value(node.comparators[0], known)
        return None if left is None or right is None else COMPARISONS[type(node.ops[0])](left, right)
    return None
