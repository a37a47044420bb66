"""itertools.cycle keeps every batch of a loader.

What:
    The program iterates over `itertools.cycle(loader)` for more than one epoch.
Why it matters:
    `cycle` keeps each item of its first pass, so all batches of an epoch stay in memory. From the second epoch
    on it returns these same batches: in the same order, and with the same random augmentations.
How to fix it:
    Use a generator that starts the loader again: `while True: yield from loader`.
Example:
  - from itertools import cycle
  -
    import torch
    from torch.utils.data import DataLoader

  +
  + def endless(loader):
  +     while True:
  +         yield from loader
  +
  +
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - batches = cycle(DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True))  # <-
  + batches = endless(DataLoader(torch.randn(64, 4), batch_size=8, shuffle=True))
    for _ in range(100):
        optimizer.zero_grad()
        model(next(batches)).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.python.org/3/library/itertools.html#itertools.cycle
"""

from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.value_paths import iterated
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in program.calls("itertools.cycle"):
        if call.args and program.values.is_a(source, iterated(call.args[0]), "DataLoader"):
            shown = source.code(call.args[0])
            yield RULE.finding(
                f"`cycle({shown})` keeps every batch of the first epoch in memory, "
                "and then repeats them in the same order",
                source.place(call),
                f"a generator: while True: yield from {source.code(iterated(call.args[0]))}",
            )


RULE = Rule("FL206", "loader_cycled", Severity.MEMORY, __doc__, check, sort_before=Severity.TIME)
