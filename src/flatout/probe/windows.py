"""Conditions on the number of a micro-batch: ``(i + 1) % n == 0`` holds once in n passes."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from dataclasses import dataclass

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

    def comparable(self, other: Window) -> bool:
        return (self.index, self.size) == (other.index, other.size)

    def holds(self, index: int, size: int) -> bool:
        """Return whether it holds in this pass. A size that the source writes as a number stays that number."""
        return bool(_value(self.test, {self.index: index, self.size: size})) is self.positive


def window_of(test: ast.expr, holds: bool = True) -> Window | None:
    """Return the only condition with a modulo in a test that has this value, or None.

    Other conditions beside it are taken to allow it: ``distributed and i % n != 0``.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return window_of(test.operand, not holds)
    if isinstance(test, ast.BoolOp):
        found = [each for each in (window_of(value, holds) for value in test.values) if each is not None]
        return found[0] if len(found) == 1 else None
    modulos = [
        node for node in ast.walk(test) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod)
    ]
    if len(modulos) != 1:
        return None
    size = last_name(modulos[0].right)
    names = {
        last_name(node) for node in ast.walk(modulos[0].left) if isinstance(node, (ast.Name, ast.Attribute))
    }
    names -= {"", "self", size}
    if not size or len(names) != 1:
        return None
    found_window = Window(names.pop(), size, test, holds)
    return found_window if _value(test, {found_window.index: 1, size: 2}) is not None else None


def last_name(node: ast.AST) -> str:
    """Return ``steps`` of ``self.config.steps``, or the digits of a number; "" for anything else."""
    if isinstance(node, ast.Constant):
        return str(node.value) if isinstance(node.value, int) else ""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _value(node: ast.expr, known: dict[str, int]) -> int | None:
    """Return the value of an expression of whole numbers, or None if a part is unknown."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) else None
    if isinstance(node, (ast.Name, ast.Attribute)):
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
