"""An iterator is exhausted after the first epoch.

What:
    `batches = iter(loader)` (or `zip`, `map`, `enumerate`, a generator) is created before the loop over
    epochs, and used inside it.
Why it matters:
    An iterator runs once. From the second epoch on, the inner loop does nothing. The program counts its
    epochs and saves its checkpoints, but trains on the data only once.
How to fix it:
    Iterate over the loader itself, or create the iterator inside the loop over epochs.
Example:
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - batches = enumerate(DataLoader(torch.randn(64, 4), batch_size=8))
  + batches = DataLoader(torch.randn(64, 4), batch_size=8)
    for epoch in range(10):
  -     for i, x in batches:  # <-
  +     for i, x in enumerate(batches):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import iterated
from flatout.schema.findings import Finding, Severity

ONCE = {"iter", "zip", "map", "filter", "enumerate", "reversed"}


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, node in program.nodes(ast.For):
        if not isinstance(node, ast.For):
            continue
        over = iterated(node.iter)
        outer = next(
            (
                each
                for each in source.parents(node)
                if isinstance(each, (ast.For, ast.While, ast.FunctionDef))
            ),
            None,
        )
        if (
            not isinstance(over, ast.Name)
            or not isinstance(outer, (ast.For, ast.While))
            or _leaves(outer, node)
        ):
            continue
        bindings = source.names.lookup(over)
        if (
            len(bindings) != 1
            or bindings[0].how != "assign"
            or bindings[0].path
            or not _runs_once(source, bindings[0].value)
        ):
            continue
        made = bindings[0].node
        if all(each is not outer for each in source.parents(made)):
            yield RULE.finding(
                f"`{over.id}` is an iterator created once, on line {source.place(made).line}: from the second pass of the outer loop on, "
                "this loop does nothing",
                source.place(node),
                f"{source.code(made)}  # inside the outer loop",
                others=[source.place(made)],
            )


def _runs_once(source: SourceFile, value: ast.AST | None) -> bool:
    if isinstance(value, ast.GeneratorExp):
        return True
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Name)
        and value.func.id in ONCE
        and not source.names.lookup(value.func)
        and not any(
            isinstance(n, ast.Call) and source.dotted(n.func).startswith("itertools.")
            for n in ast.walk(value)
        )
    )


def _leaves(outer: ast.AST, inner: ast.For) -> bool:
    """Return whether the inner loop may stop early and resume (it needs an iterator), or the outer breaks."""
    return any(isinstance(node, (ast.Break, ast.Return)) for node in ast.walk(inner)) or any(
        isinstance(node, ast.Break) for node in getattr(outer, "body", [])
    )


RULE = Rule("FL031", "iterator_used_up", Severity.WRONG, __doc__, check, weight=-1)
