"""The optimizer has a parameter group for each parameter.

What:
    The groups come from a loop over the parameters, with one parameter in each group.
Why it matters:
    A fused or foreach optimizer updates the tensors of a group together. With one tensor a group, it launches
    as many kernels as a loop over the parameters. Hundreds of groups also make schedulers and `zero_grad`
    slower.
How to fix it:
    Collect parameters with the same options in one group: those with weight decay and those without, or one
    group per learning rate.
Example:
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(10)])
  - groups = []
  - for name, value in model.named_parameters():
  -     groups += [{"params": [value], "weight_decay": 0.0 if "bias" in name else 0.01}]  # <-
  + biases = [value for name, value in model.named_parameters() if "bias" in name]
  + weights = [value for name, value in model.named_parameters() if "bias" not in name]
  + groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/optim.html#per-parameter-options
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import COMPREHENSIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

COLLECTS = {"append", "extend", "insert", "add_param_group"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.Dict):
        assert isinstance(node, ast.Dict)
        params = next(
            (value for key, value in zip(node.keys, node.values, strict=True) if _is(key, "params")), None
        )
        alone = params.elts[0] if isinstance(params, ast.List) and len(params.elts) == 1 else params
        if isinstance(alone, ast.Name) and _each_parameter(source, node, alone.id):
            yield RULE.finding(
                f"each parameter gets a group of its own, so the optimizer updates `{alone.id}` by `{alone.id}`",
                source.place(node),
                '{"params": [all parameters with the same options], ...}',
            )


def _is(key: ast.expr | None, name: str) -> bool:
    return isinstance(key, ast.Constant) and key.value == name


def _each_parameter(source: SourceFile, node: ast.AST, name: str) -> bool:
    """Whether the innermost loop over this name is one over the parameters of a module."""
    for around in source.parents(node):
        if isinstance(around, ast.Call) and getattr(around.func, "attr", "") not in COLLECTS:
            return False  # an optimizer for each parameter, which steps during the backward pass
        loops: list[tuple[ast.expr, ast.expr]] = []
        if isinstance(around, (ast.For, ast.AsyncFor)):
            loops = [(around.target, around.iter)]
        elif isinstance(around, COMPREHENSIONS):
            loops = [(each.target, each.iter) for each in around.generators]
        for target, iterable in reversed(loops):
            if any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(target)):
                return any(
                    isinstance(each, ast.Call)
                    and isinstance(each.func, ast.Attribute)
                    and each.func.attr in ("parameters", "named_parameters")
                    for each in ast.walk(iterable)
                )
    return False


RULE = Rule("FL119", "group_for_each_parameter", Severity.TIME, __doc__, check)
