"""A non-blocking copy reads from memory that is not pinned.

What:
    Batches are moved with `non_blocking=True`, but their loader has no `pin_memory=True`.
Why it matters:
    From pageable memory, the driver must first copy to its own pinned buffer, and the host waits for that.
    `non_blocking=True` then has almost no effect.
How to fix it:
    Set `DataLoader(..., pin_memory=True)`.
Example:
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - for x in DataLoader(torch.randn(64, 4), batch_size=8):
  + for x in DataLoader(torch.randn(64, 4), batch_size=8, pin_memory=True):
        x = x.to("cuda", non_blocking=True)  # <-
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
Sources:
    https://docs.pytorch.org/tutorials/intermediate/pinmem_nonblock.html
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rewrites import add_argument
from flatout.diagnose.rule import Rule
from flatout.diagnose.rules.pinned_and_blocking import batches_moved, pins
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent
from flatout.probe.value_paths import is_given
from flatout.probe.values import ValueOrigin
from flatout.schema.findings import Edit, Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    pinned_elsewhere = program.mentions("pin_memory")  # a collate function may pin
    for event, loader in batches_moved(program):
        assert isinstance(event.node, ast.Call)
        if pinned_elsewhere and "collate_fn" in _options(loader.node):
            continue
        if is_given(event.node, "non_blocking", True) and pins(loader) is False:
            yield RULE.finding(
                "`non_blocking=True` has no effect here: the batch comes from a loader without pinned memory",
                event.place,
                f"{loader.source.code(loader.node)[:-1]}, pin_memory=True)",
                others=[loader.source.place(loader.node)],
                edits=_edits(event, loader),
            )


def _edits(event: ProgramEvent, loader: ValueOrigin) -> list[Edit]:
    """Return the edit of the loader if it is in the same file or cell and does not switch pinning off."""
    call, source = loader.node, event.source
    if (
        loader.source is not source
        or not isinstance(call, ast.Call)
        or "pin_memory" in _options(call)
        or source.place(call).file != event.place.file
    ):
        return []
    return add_argument(source, call, "pin_memory=True")


def _options(call: ast.AST) -> set[str | None]:
    return {keyword.arg for keyword in call.keywords} if isinstance(call, ast.Call) else set()


RULE = Rule(
    "FL110",
    "non_blocking_without_pinning",
    Severity.TIME,
    __doc__,
    check,
    levers=("loader", "device_prefetch"),
    fix_changes="",
)
