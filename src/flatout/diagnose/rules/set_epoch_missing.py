"""A DistributedSampler does not get the epoch.

What:
    A `DistributedSampler` shuffles, and there is a loop over epochs, but `sampler.set_epoch(epoch)` is never
    called.
Why it matters:
    The sampler shuffles with a generator seeded by `seed + epoch`. Without `set_epoch`, the epoch stays 0.
    Every epoch has the same order and the same batches, and SGD loses the noise from shuffling.
How to fix it:
    Call `sampler.set_epoch(epoch)` at the start of every epoch.
Bad:
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    torch.distributed.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 4))
    sampler = DistributedSampler(data)  # <-
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(10):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
Good:
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    torch.distributed.init_process_group("gloo")
    data = TensorDataset(torch.randn(64, 4))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(10):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import StepLoop
from flatout.probe.value_paths import iterated
from flatout.schema.findings import Finding, Severity

SAMPLERS = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")


def look(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions("set_epoch", "Trainer", "Fabric", "Accelerator"):
        return
    epochs = [loop for loop in program.step_loops if loop.outer and isinstance(loop.loop.node, ast.For)]
    for source, call in program.calls(*SAMPLERS):
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        shuffle = options.get("shuffle", call.args[3] if len(call.args) > 3 else None)
        if None in options or (
            shuffle is not None and not (isinstance(shuffle, ast.Constant) and shuffle.value is True)
        ):
            continue
        if any(_feeds(program, call, loop) for loop in epochs):
            target = getattr(source.parent(call), "targets", [None])[0]
            name = source.code(target) if isinstance(target, (ast.Name, ast.Attribute)) else "sampler"
            yield RULE.finding(
                "this sampler shuffles but does not get the epoch: every epoch has the same order",
                source.place(call),
                f"{name}.set_epoch(epoch)  # first line of the loop over epochs",
            )


def _feeds(program: ScriptProgram, sampler: ast.Call, loop: StepLoop) -> bool:
    """Return whether the training loop iterates over a loader with this sampler."""
    assert isinstance(loop.loop.node, ast.For)
    for origin in program.origins(loop.source, iterated(loop.loop.node.iter)):
        if isinstance(origin.node, ast.Call):
            handed = next((k.value for k in origin.node.keywords if k.arg == "sampler"), None)
            if handed is not None and any(
                each.node is sampler for each in program.origins(origin.source, handed)
            ):
                return True
    return False


RULE = Rule("FL012", "set_epoch_missing", Severity.WRONG, __doc__, look=look)
