"""Modules whose creation the program does not show: its use of them tells.

A trainer class gets its model from a registry or a config. ``self.model.eval()`` or ``model.parameters()`` in the
same class or function says what it is.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from flatout.probe.names import FUNCTIONS
from flatout.probe.script import SourceFile

if TYPE_CHECKING:
    from flatout.probe.values import Values

USES = {"parameters", "named_parameters", "eval"}


class ModulesByUse:
    def __init__(self, values: Values) -> None:
        self.values = values
        self._used: dict[int, set[tuple[int, str]]] = {}

    def __contains__(self, pair: tuple[SourceFile, ast.AST]) -> bool:
        """Return whether a name or an attribute of ``self`` is used as a module where it stands."""
        source, node = pair
        if isinstance(node, ast.Name):
            bindings = source.names.lookup(node)
            return (
                bool(bindings)
                and all(each.how in ("parameter", "assign") for each in bindings)
                and any((id(scope), node.id) in self._of(source) for scope in _scopes(source, node))
            )
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self":
            klass = source.klass(node)
            return klass is not None and any(
                (id(each), node.attr) in self._of(home)
                for home, each in self.values.gradient_sources(source, klass)
            )
        return False

    def _of(self, source: SourceFile) -> set[tuple[int, str]]:
        """Return the functions with the names, and the classes with the attributes, that are used so in a file."""
        if id(source) not in self._used:
            found = self._used[id(source)] = set()
            for call in source.calls:
                if not isinstance(call.func, ast.Attribute) or call.func.attr not in USES or call.args:
                    continue
                owner = call.func.value
                if isinstance(owner, ast.Name):
                    found.add((id(_scopes(source, call)[0]), owner.id))
                elif isinstance(owner, ast.Attribute) and getattr(owner.value, "id", "") == "self":
                    found.add((id(source.klass(call)), owner.attr))
        return self._used[id(source)]


def _scopes(source: SourceFile, node: ast.AST) -> list[ast.AST]:
    """Return the functions around a node, innermost first, and the file."""
    return [*(each for each in source.parents(node) if isinstance(each, FUNCTIONS)), source.tree]
