"""Models that need gradients to compute their output: forces from an energy, derivatives in a physical equation.

``torch.no_grad()`` around such a model fails or changes the result. The use may be in any file that the script
reaches. Gradients that only a training step takes, such as those of a penalty, do not count.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.probe.names import FUNCTIONS
from flatout.probe.package_files import reached_files
from flatout.probe.script import SourceFile, Unreadable

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

TAKES = ("torch.autograd.grad", "torch.autograd.functional.", "torch.func.")
WORDS = re.compile(r"autograd|create_graph|torch\.func\b|requires_grad_\((?!False)|requires_grad = True")


def needs_gradients(program: ScriptProgram) -> bool:
    """Return whether a forward pass may take gradients itself."""
    read = {Path(source.path).resolve() for source in program.sources}
    for source in program.sources:
        if any(not _only_trains(program, source, node) for node in _uses(source)):
            return True
    for file, text in reached_files(Path(program.main.path)):
        if file not in read and WORDS.search(text):
            try:
                if any(_uses(SourceFile(str(file), text))):
                    return True
            except Unreadable:
                continue
    return False


def _uses(source: SourceFile) -> Iterator[ast.AST]:
    """Yield the places where gradients are taken, or requested of an input."""
    for node in source.nodes:
        if isinstance(node, ast.Call):
            dotted = source.dotted(node.func)
            creates = any(
                k.arg == "create_graph" and getattr(k.value, "value", True) is not False
                for k in node.keywords
            )
            asks = (
                isinstance(node.func, ast.Attribute)
                and node.func.attr == "requires_grad_"
                and not any(getattr(each, "value", True) is False for each in node.args)
                and _of_an_input(source, node.func.value)
            )
            if (dotted.startswith(TAKES) or creates or asks) and source.function(node) is not None:
                yield node
        elif isinstance(node, ast.Assign) and getattr(node.value, "value", None) is True:
            target = node.targets[0]
            if (
                isinstance(target, ast.Attribute)
                and target.attr == "requires_grad"
                and _of_an_input(source, target.value)
            ):
                yield node


def _of_an_input(source: SourceFile, node: ast.expr) -> bool:
    """Return whether a value is made from a parameter of a ``forward``, not from the weights of the model."""
    function = source.function(node)
    if function is None or function.name not in ("forward", "__call__"):
        return False
    root: ast.AST = node
    while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
        root = root.func if isinstance(root, ast.Call) else root.value
    if not isinstance(root, ast.Name) or root.id == "self":
        return False
    return all(binding.how != "for" for binding in source.names.lookup(root))


def _only_trains(program: ScriptProgram, source: SourceFile, node: ast.AST) -> bool:
    """Return whether a training loop reaches this place, and no other code that is visible does."""
    function = source.function(node)
    trains = {loop.loop for loop in program.steps}
    reached = [
        event
        for event in program.events
        if function in event.frames
        and isinstance(function, FUNCTIONS)
        and event.source.function(event.node) is function
    ]
    return bool(reached) and all(trains & set(event.loops) for event in reached)
