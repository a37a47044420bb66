"""Expressions of an event as seen from its callers: parameters are replaced by what this chain of calls passes.

``Values`` follows a parameter to the arguments of all callers. An event was reached through one chain of calls,
so it knows which of them applies.
"""

import ast

from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent
from flatout.probe.value_paths import argument
from flatout.probe.values import ValueOrigin


def passed(event: ProgramEvent, node: ast.expr) -> tuple[SourceFile, ast.expr]:
    """Return the expression that a name of the event stands for in the outermost caller that passes it."""
    source = event.source
    for frame, entered in zip(reversed(event.frames), reversed(event.calls), strict=True):
        bindings = source.names.reaching(node) if isinstance(node, ast.Name) else []
        if len(bindings) != 1 or bindings[0].how != "parameter":
            break
        parameter = bindings[0].node
        if source.parent(source.parent(parameter) or source.tree) is not frame:
            continue  # of a function further out
        handed = argument(source, frame, parameter, entered[1]) if entered is not None else None
        if entered is None or handed is None:
            break
        source, node = entered[0], handed
    return source, node


def origins(program: ScriptProgram, event: ProgramEvent, node: ast.expr) -> list[ValueOrigin]:
    """Return the origins of an expression of the event, along the calls that led to it."""
    return program.origins(*passed(event, node))


def same(
    program: ScriptProgram, one: ProgramEvent, node: ast.expr, other: ProgramEvent, other_node: ast.expr
) -> bool | None:
    """Return whether two expressions are one object where the two events happen, or None if unknown."""
    source, first = passed(one, node)
    other_source, second = passed(other, other_node)
    return program.values.same(source, first, other_source, second)
