"""Who calls a function of the program, and the contexts that hold around all of these calls.

A call through ``self`` may run the method of a subclass: a base class calls ``self.validate()``, and a subclass
overrides it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from flatout.probe.names import FUNCTIONS
from flatout.probe.script import SourceFile

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

Function = tuple[SourceFile, ast.AST]
Block = tuple[SourceFile, ast.expr]

MAX_CHAIN = 4  # of callers of callers
NO_BASES = {"object", "ABC", "abc.ABC", "typing.Generic", "typing.Protocol"}


class Callers:
    def __init__(self, program: ScriptProgram) -> None:
        self.program = program

    def of(self, function: ast.AST) -> list[tuple[SourceFile, ast.Call]]:
        return self._found.get(id(function), [])

    def overrides(self, klass: ast.ClassDef, name: str) -> list[Function]:
        """Return the methods of this name in the subclasses of a class."""
        return [
            (home, method)
            for home, each in self._subclasses.get(id(klass), [])
            for method in each.body
            if isinstance(method, FUNCTIONS) and method.name == name
        ]

    def blocks(self, source: SourceFile, function: ast.AST, depth: int = 0) -> tuple[Block, ...]:
        """Return the ``with`` blocks and decorators that are around every known call of a function."""
        calls = self.of(function) or list(self._by_name(source, function))
        if not calls or depth > MAX_CHAIN:
            return ()
        around = [self._around(home, call, depth) for home, call in calls]
        return tuple(
            (home, block)
            for home, block in around[0]
            if all(any(_alike(home, block, other, each) for other, each in blocks) for blocks in around[1:])
        )

    def _around(self, source: SourceFile, call: ast.Call, depth: int) -> list[Block]:
        function = source.function(call)
        inner: list[Block] = []
        child: ast.AST = call
        for node in source.parents(call):
            if node is function:
                break
            if isinstance(node, (ast.With, ast.AsyncWith)) and isinstance(child, ast.stmt):
                inner[:0] = [(source, item.context_expr) for item in node.items]
            child = node
        if function is None:
            return inner
        decorators = [(source, each) for each in function.decorator_list]
        return [*self.blocks(source, function, depth + 1), *decorators, *inner]

    def _by_name(self, source: SourceFile, function: ast.AST) -> Iterator[tuple[SourceFile, ast.Call]]:
        """Yield the calls ``x.name()`` for any x, for a method that only the program calls."""
        klass = source.parent(function)
        if isinstance(klass, ast.ClassDef) and isinstance(function, FUNCTIONS):
            name = function.name
            own = self.program.values.bases(source, klass) <= NO_BASES
            if own and not name.startswith("__") and name != "forward":
                yield from self.program.method_calls(name)

    @cached_property
    def _found(self) -> dict[int, list[tuple[SourceFile, ast.Call]]]:
        found: dict[int, list[tuple[SourceFile, ast.Call]]] = {}
        for source in self.program.sources:
            stores = [call for node in source.nodes for call in self.program.stores.of(source, node)]
            for call in [*source.calls, *stores]:
                for _, target in self._targets(source, call):
                    found.setdefault(id(target), []).append((source, call))
        return found

    def _targets(self, source: SourceFile, call: ast.Call) -> Iterator[Function]:
        for home, definition in self.program.definitions(source, call.func):
            if isinstance(definition, ast.ClassDef):
                yield from self.program.methods(home, definition, "__init__")
            else:
                yield home, definition
        if not isinstance(call.func, ast.Attribute) or source.dotted(call.func):
            return
        owner, name = call.func.value, call.func.attr
        klass = source.klass(call)
        own: list[Function] = []
        if klass is not None and getattr(owner, "id", "") == "self":
            own = [*self.program.methods(source, klass, name), *self.overrides(klass, name)]
        elif klass is not None and isinstance(owner, ast.Call) and getattr(owner.func, "id", "") == "super":
            inherited = self.program.values.gradient_sources(source, klass)[1:]
            own = [pair for home, base in inherited[:1] for pair in self.program.methods(home, base, name)]
        yield from own or self._unique.get(name, [])

    @cached_property
    def _subclasses(self) -> dict[int, list[tuple[SourceFile, ast.ClassDef]]]:
        found: dict[int, list[tuple[SourceFile, ast.ClassDef]]] = {}
        for source in self.program.sources:
            for klass in source.classes:
                for _, base in self.program.values.gradient_sources(source, klass)[1:]:
                    found.setdefault(id(base), []).append((source, klass))
        return found

    @cached_property
    def _unique(self) -> dict[str, list[Function]]:
        """Return methods by name, if only one class of the program has that name.

        Then a call needs no proof of its class.
        """
        found: dict[str, list[Function]] = {}
        for source in self.program.sources:
            for klass in source.classes:
                for method in klass.body:
                    if isinstance(method, FUNCTIONS):
                        found.setdefault(method.name, []).append((source, method))
        return {name: methods for name, methods in found.items() if len(methods) == 1}


def is_abstract(function: ast.AST) -> bool:
    """Return whether a method is only a place for those of subclasses: ``pass``, or NotImplementedError."""
    return all(
        isinstance(each, (ast.Pass, ast.Raise))
        or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in getattr(function, "body", [function])
    )


def _alike(source: SourceFile, one: ast.expr, other_source: SourceFile, other: ast.expr) -> bool:
    """Return whether two blocks enter the same context: one name of a package, with the same arguments."""
    first, second = (each.func if isinstance(each, ast.Call) else each for each in (one, other))
    named = source.dotted(first)
    same_name = bool(named) and named == other_source.dotted(second)
    arguments = [
        [ast.dump(each) for each in (*block.args, *block.keywords)] if isinstance(block, ast.Call) else []
        for block in (one, other)
    ]
    return same_name and arguments[0] == arguments[1]
