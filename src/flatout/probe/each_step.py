"""The functions that run in each training step, the ``forward`` of the program's own modules included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import TYPE_CHECKING

from flatout.probe.script import SourceFile

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

MAX_FUNCTIONS = 2_000


def functions_of_each_step(program: ScriptProgram) -> dict[int, tuple[SourceFile, ast.AST]]:
    """Return all functions that the passes of the training loops may call, by the id of their node."""
    waiting: list[tuple[SourceFile, ast.AST]] = [
        pair
        for loop in program.step_loops
        for event in loop.of("call")
        if isinstance(event.node, ast.Call)
        for pair in called(program, event.source, event.node)
    ]
    found: dict[int, tuple[SourceFile, ast.AST]] = {}
    while waiting and len(found) < MAX_FUNCTIONS:
        source, function = waiting.pop()
        if id(function) not in found:
            found[id(function)] = source, function
            waiting += [
                pair
                for node in ast.walk(function)
                if isinstance(node, ast.Call)
                for pair in called(program, source, node)
            ]
    return found


def called(
    program: ScriptProgram, source: SourceFile, call: ast.Call
) -> Iterator[tuple[SourceFile, ast.AST]]:
    """Yield the functions that a call runs; for an instance, its ``forward`` or ``__call__``."""
    functions = program.functions_called(source, call)
    yield from functions
    if not functions and not source.dotted(call.func):
        for home, klass in program.values.classes_of(source, call.func):
            for name in ("forward", "__call__"):
                yield from program.methods(home, klass, name)
