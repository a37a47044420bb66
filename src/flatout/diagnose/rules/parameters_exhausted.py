"""model.parameters() is stored and used twice.

What:
    A name is set to `model.parameters()` (or a `filter` or generator over it), and used in two places.
Why it matters:
    It is a generator: the first use exhausts it. The second use finds no parameters and raises no error.
    Clipping clips nothing, a sum over the parameters is zero, and a part to freeze is not frozen.
How to fix it:
    Use `list(model.parameters())`, or call `model.parameters()` in each place.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
  - params = model.parameters()
  + params = list(model.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0)  # <-
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import FUNCTIONS, position
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source in program.sources:
        for node in source.nodes:
            if (
                not isinstance(node, ast.Assign)
                or not isinstance(node.targets[0], ast.Name)
                or not _generator(node.value)
            ):
                continue
            name = node.targets[0]
            bindings = source.names.lookup(name)
            if len(bindings) != 1:
                continue
            uses = [
                use
                for use in source.nodes
                if isinstance(use, ast.Name) and use.id == name.id and isinstance(use.ctx, ast.Load)
            ]
            uses = sorted(
                (use for use in uses if source.names.lookup(use) is bindings and _consumes(source, use)),
                key=position,
            )
            here = [use for use in uses if source.function(use) is source.function(node)]
            if len(here) >= 2 and _one_after_the_other(source, here[0], here[1]):
                yield RULE.finding(
                    f"`{name.id}` is a generator that line {here[0].lineno} has exhausted: nothing is left for this line",
                    source.place(here[1]),
                    f"{name.id} = list({source.code(node.value)})",
                    others=[source.place(here[0])],
                )


def _generator(value: ast.AST) -> bool:
    """Return whether a value is ``model.parameters()``, or a filter, map or generator over it."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        return value.func.attr in ("parameters", "named_parameters") and not value.args
    if (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ("filter", "map")
    ):
        return any(_generator(argument) for argument in value.args)
    return isinstance(value, ast.GeneratorExp) and _generator(value.generators[0].iter)


def _consumes(source: SourceFile, use: ast.Name) -> bool:
    parent = source.parent(use)
    return (isinstance(parent, ast.Call) and use in parent.args) or (
        isinstance(parent, (ast.For, ast.comprehension)) and parent.iter is use
    )


def _one_after_the_other(source: SourceFile, first: ast.AST, second: ast.AST) -> bool:
    arms = {id(node): arm for node, arm in source.names.arms(first)}
    apart = any(arms.get(id(node), arm) != arm for node, arm in source.names.arms(second))
    deferred = any(
        isinstance(each, (ast.Lambda, *FUNCTIONS)) and each not in list(source.parents(first))
        for each in source.parents(second)
    )
    return not apart and not deferred


RULE = Rule("FL033", "parameters_used_up", Severity.WRONG, __doc__, check, weight=-1)
