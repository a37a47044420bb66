"""Assignments that run a method of the program: ``stats["loss"] = loss`` calls ``stats.__setitem__("loss", loss)``.

The reader treats them as that call. The call has the assignment as its parent.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from flatout.probe.script import SourceFile

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

NAME = "__setitem__"


class Stores:
    def __init__(self, program: ScriptProgram) -> None:
        self.program = program
        self.any = any(function.name == NAME for source in program.sources for function in source.functions)
        self._calls: dict[int, ast.Call] = {}

    def of(self, source: SourceFile, node: ast.AST) -> list[ast.Call]:
        """Return the calls of ``__setitem__`` that an assignment runs, if a class of the program has the method."""
        if not self.any or not isinstance(node, ast.Assign):
            return []
        return [
            self._call(source, node, target)
            for target in node.targets
            if isinstance(target, ast.Subscript) and not isinstance(target.value, ast.Subscript)
        ]

    def _call(self, source: SourceFile, node: ast.Assign, target: ast.Subscript) -> ast.Call:
        if id(target) not in self._calls:
            method = ast.copy_location(ast.Attribute(target.value, NAME, ast.Load()), target)
            call = ast.copy_location(ast.Call(method, [target.slice, node.value], []), node)
            source.names.parents[id(call)] = node
            source.names.parents[id(method)] = call
            self._calls[id(target)] = call
        return self._calls[id(target)]


def is_store(node: ast.AST) -> bool:
    """Return whether a call stands for an assignment."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == NAME
