"""Every batch creates a new iterator.

What:
    `next(iter(loader))` is in the training loop, or in the loop of an evaluation.
Why it matters:
    Each call starts a new epoch for one batch. The workers are started and stopped each time, and the batches
    they prefetched are discarded. Without shuffling, every call returns the first batch, and the rest of the
    data is never used.
How to fix it:
    Iterate over the loader. Or create the iterator once, before the loop, and recreate it when it is
    exhausted.
Example:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - for _ in range(100):
  -     x = next(iter(loader))  # <-
  + for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.evaluation_loops import without_training
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import StepLoop
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    info: set[int] = set()
    loops = [(loop, 0) for loop in program.steps] + [(loop, -1) for loop in without_training(program)]
    for loop, weight in loops:
        for event in loop.of("call"):
            given = _loader(event.node)
            if (
                given is not None
                and loop.always(event)
                and id(event.node) not in info
                and _is_loader(program, event.source, given)
                and not _changes(event.source, given, loop)
            ):
                info.add(id(event.node))
                loader = event.source.code(given)
                yield RULE.finding(
                    f"`{event.source.code(event.node)}` starts a new epoch of `{loader}` for every batch",
                    event.place,
                    f"batches = iter({loader})  # before the loop\nnext(batches)",
                    weight=weight,
                )


def _loader(call: ast.AST) -> ast.expr | None:
    """Return the loader of ``next(iter(loader))`` or ``iter(loader).next()``."""
    if not isinstance(call, ast.Call):
        return None
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("next", "__next__"):
        inner = call.func.value
    elif getattr(call.func, "id", "") == "next" and call.args:
        inner = call.args[0]
    else:
        return None
    if isinstance(inner, ast.Call) and getattr(inner.func, "id", "") == "iter" and inner.args:
        return inner.args[0]
    made = inner.func if isinstance(inner, ast.Call) else None
    return made.value if isinstance(made, ast.Attribute) and made.attr == "__iter__" else None


def _is_loader(program: ScriptProgram, source: SourceFile, node: ast.expr) -> bool:
    known = program.values.kinds(source, node) - {"NoneType"}
    if known:
        return "DataLoader" in known
    notes = [getattr(each.node, "annotation", None) for each in source.bindings(node)]
    classes = [ast.unparse(note).split("[")[0].rpartition(".")[2] for note in notes if note is not None]
    if any(each != "DataLoader" for each in classes):
        return False
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name.lower().endswith("loader")


def _changes(source: SourceFile, loader: ast.expr, loop: StepLoop) -> bool:
    """Return whether each pass has a loader of its own: one batch is fetched from each of several."""
    names = {each.id for each in ast.walk(loader) if isinstance(each, ast.Name)}
    bound = {
        each.id
        for each in ast.walk(loop.loop.node)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return source is loop.source and bool(names & bound)


RULE = Rule("FL117", "fresh_iterator_every_step", Severity.TIME, __doc__, check)
