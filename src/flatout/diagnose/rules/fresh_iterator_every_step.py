"""Every batch creates a new iterator.

What:
    `next(iter(loader))` is in the training loop.
Why it matters:
    Each call starts a new epoch for one batch. The workers are started and stopped each time, and the batches
    they prefetched are discarded. Without shuffling, every call returns the first batch, and the rest of the
    data is never used.
How to fix it:
    Iterate over the loader. Or create the iterator once, before the loop, and recreate it when it is
    exhausted.
Bad:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        x = next(iter(loader))  # <-
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
Good:
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in loader:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.schema.findings import Finding, Severity


def look(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.of("call"):
            call = event.node
            if not (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Name)
                and call.func.id == "next"
                and call.args
                and loop.always(event)
            ):
                continue
            inner = call.args[0]
            if (
                isinstance(inner, ast.Call)
                and isinstance(inner.func, ast.Name)
                and inner.func.id == "iter"
                and inner.args
                and program.values.is_a(event.source, inner.args[0], "DataLoader")
            ):
                loader = event.source.code(inner.args[0])
                yield RULE.finding(
                    f"`{event.source.code(call)}` starts a new epoch of `{loader}` for every batch",
                    event.place,
                    f"batches = iter({loader})  # before the loop\nnext(batches)",
                )


RULE = Rule("FL117", "fresh_iterator_every_step", Severity.TIME, __doc__, look=look)
