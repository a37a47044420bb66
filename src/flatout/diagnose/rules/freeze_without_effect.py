"""Freezing has no effect.

What:
    `requires_grad = False` is set on a module, such as one of `model.children()`. Or the name of the
    attribute is misspelled (`require_grad`, `requires_gradient`).
Why it matters:
    Python sets a new attribute that is never read. The layers that should stay fixed keep training.
How to fix it:
    Use `module.requires_grad_(False)` for a whole module, and `parameter.requires_grad = False` for one
    parameter.
Example:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
  - model.requires_grad = False  # <-
  + model.requires_grad_(False)
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.module_parts import is_module
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


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node, target, value in _assigned(program):
        constant = isinstance(value, ast.Constant) and isinstance(value.value, bool)
        owner = source.code(target.value)
        if constant and target.attr in MISSPELLED and not _read(source, target.attr):
            yield RULE.finding(
                f"`{target.attr}` is misspelled: the line sets an attribute that is never read",
                source.place(node),
                f"{owner}.requires_grad = {source.code(value)}",
            )
        elif (
            target.attr == "requires_grad"
            and is_module(program, source, target.value)
            and not _has_an_effect(source, target)
        ):
            yield RULE.finding(
                f"`{owner}` is a module: this sets an attribute that is never read, and its parameters do not change",
                source.place(node),
                f"{owner}.requires_grad_({source.code(value)})",
            )


def _assigned(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.AST, ast.Attribute, ast.expr]]:
    """Yield the attributes that are set, by ``=`` or by ``setattr``."""
    for source, node in program.nodes(ast.Assign, ast.Call):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Attribute):
                    yield source, node, target, node.value
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "setattr" and len(node.args) == 3:
            owner, name, value = node.args
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield (
                    source,
                    node,
                    ast.copy_location(ast.Attribute(owner, name.value, ast.Store()), node),
                    value,
                )


def _has_an_effect(source: SourceFile, target: ast.Attribute) -> bool:
    """Return whether the class reads the attribute, or the parameters of the module are set beside it."""
    klass = source.klass(target.value) if getattr(target.value, "id", "") == "self" else None
    read = any(
        isinstance(node, ast.Attribute)
        and node.attr == "requires_grad"
        and isinstance(node.ctx, ast.Load)
        and getattr(node.value, "id", "") == "self"
        for node in (ast.walk(klass) if klass is not None else ())
    )
    defined = any(each.name in ("requires_grad", "__setattr__") for each in source.functions)
    owner = ast.dump(target.value)
    loop = next((each for each in source.parents(target.value) if isinstance(each, ast.For)), None)
    also = any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("parameters", "named_parameters", "requires_grad_")
        and ast.dump(node.func.value) == owner
        for node in ast.walk(loop or source.function(target.value) or source.tree)
    )
    return read or defined or also


def _read(source: SourceFile, name: str) -> bool:
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Load)
        for node in source.nodes
    )


RULE = Rule("FL034", "freeze_without_effect", Severity.WRONG, __doc__, check)
