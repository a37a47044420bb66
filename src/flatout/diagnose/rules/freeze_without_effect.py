"""Freezing has no effect.

What:
    `requires_grad = False` is set on a module, or the name of the attribute is misspelled (`require_grad`,
    `requires_gradient`).
Why it matters:
    Python sets a new attribute that is never read. The layers that should stay fixed keep training.
How to fix it:
    Use `module.requires_grad_(False)` for a whole module, and `parameter.requires_grad = False` for one
    parameter.
Bad:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model.requires_grad = False  # <-
Good:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
    model.requires_grad_(False)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

MISSPELLED = {
    "require_grad",
    "required_grad",
    "requires_grads",
    "require_grads",
    "requiers_grad",
    "requires_gradient",
    "required_grads",
    "requries_grad",
}


def look(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.Assign):
        if (
            not isinstance(node, ast.Assign)
            or not isinstance(node.value, ast.Constant)
            or not isinstance(node.value.value, bool)
        ):
            continue
        target, value = node.targets[0], node.value.value
        if not isinstance(target, ast.Attribute):
            continue
        owner = source.code(target.value)
        if target.attr in MISSPELLED and not _read(source, target.attr):
            yield RULE.finding(
                f"`{target.attr}` is misspelled: the line sets an attribute that is never read",
                source.place(node),
                f"{owner}.requires_grad = {value}",
            )
        elif target.attr == "requires_grad" and _surely_module(program, source, target.value):
            yield RULE.finding(
                f"`{owner}` is a module: this sets an attribute that is never read, and its parameters do not change",
                source.place(node),
                f"{owner}.requires_grad_({value})",
            )


def _read(source: SourceFile, name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
        for node in source.nodes
    )


def _surely_module(program: ScriptProgram, source: SourceFile, node: ast.AST) -> bool:
    """Return whether every possible value of an expression is a module."""
    origins = program.origins(source, node)
    return bool(origins) and all(
        "Module" in program.values.kinds(origin.source, origin.node) and not origin.part for origin in origins
    )


RULE = Rule("FL034", "freeze_without_effect", Severity.WRONG, __doc__, look=look)
