"""A cache with tensors as keys never finds an entry.

What:
    A dictionary is used as a cache: `if key not in cache: cache[key] = ...`. The key is a new tensor each time.
Why it matters:
    A dictionary finds a tensor only by its identity, not by its values. So each look-up fails, the value is
    computed again, and one more entry stays in memory.
How to fix it:
    Use numbers as keys: `tuple(key.tolist())`. To keep the keys off the device, take them from `shape`.
Example:
    import torch


    class Positions(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x):
  -         sizes = torch.stack([torch.tensor(each.shape) for each in x])
  -         for size in sizes:
  +         for size in [tuple(each.shape) for each in x]:
                if size not in self.cache:
  -                 self.cache[size] = torch.arange(int(size.prod()))  # <-
  +                 self.cache[size] = torch.arange(size[0])
            return x
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import Binding
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, statement in program.nodes(ast.Assign):
        assert isinstance(statement, ast.Assign)
        target = statement.targets[0]
        if not isinstance(target, ast.Subscript) or not isinstance(target.slice, ast.Name):
            continue
        cache, key = target.value, target.slice
        looked_up = next(
            (
                each
                for each, arm in source.names.arms(statement)
                if arm == "body" and _asks_for(each.test, key, cache)
            ),
            None,
        )
        bindings = source.names.reaching(key)
        if (
            looked_up is not None
            and program.values.is_a(source, cache, "dict")
            and bindings
            and all(_new_tensor(program, source, binding) for binding in bindings)
        ):
            yield RULE.finding(
                f"`{source.code(cache)}` never finds `{key.id}`: a tensor is found by its identity only, "
                "so the cache grows with every call",
                source.place(statement),
                f"{key.id} = tuple({key.id}.tolist())",
                others=[source.place(looked_up)],
            )


def _asks_for(test: ast.expr, key: ast.Name, cache: ast.expr) -> bool:
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.NotIn)
        and isinstance(test.left, ast.Name)
        and test.left.id == key.id
        and ast.unparse(test.comparators[0]) == ast.unparse(cache)
    )


def _new_tensor(program: ScriptProgram, source: SourceFile, binding: Binding) -> bool:
    """Return whether a name is a row of a tensor, or a tensor that was just computed."""
    value = binding.value
    if value is None:
        return False
    if binding.how == "for":
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "enumerate":
            return binding.path == (1,) and program.values.kinds(source, value.args[0]) == {"Tensor"}
        return not binding.path and program.values.kinds(source, value) == {"Tensor"}
    return (
        binding.how == "assign"
        and not binding.path
        and isinstance(value, ast.Call)
        and program.values.kinds(source, value) == {"Tensor"}
    )


RULE = Rule("FL207", "tensor_as_key", Severity.MEMORY, __doc__, check, sort_before=Severity.TIME)
