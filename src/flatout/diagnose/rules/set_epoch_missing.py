"""A DistributedSampler does not get the epoch.

What:
    A `DistributedSampler` shuffles, and there is a loop over epochs, but `sampler.set_epoch(epoch)` is never
    called. A generator that starts a loader again and again is a loop over epochs, too.
Why it matters:
    The sampler shuffles with a generator seeded by `seed + epoch`. Without `set_epoch`, the epoch stays 0.
    Every epoch has the same order and the same batches, and SGD loses the noise from shuffling.
How to fix it:
    Call `sampler.set_epoch(epoch)` at the start of every epoch.
Example:
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
  +     sampler.set_epoch(epoch)
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
Sources:
    https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.distributed.DistributedSampler
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent
from flatout.probe.value_paths import iterated
from flatout.probe.values import ValueOrigin
from flatout.schema.findings import Finding, Severity

SAMPLERS = ("torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler")


def check(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions("set_epoch", "Trainer", "Fabric", "Accelerator"):
        return
    yield from _endless(program)
    loaders = [
        (loop.source, loop.loop.node.iter)
        for loop in program.step_loops
        if loop.outer and isinstance(loop.loop.node, ast.For)
    ]
    loaders += [
        (event.source, loader)
        for loop in program.step_loops
        for event in loop.events
        if (loader := _started_again(event)) is not None
    ]
    for source, call in program.calls(*SAMPLERS):
        options = {keyword.arg: keyword.value for keyword in call.keywords}
        shuffle = options.get("shuffle", call.args[3] if len(call.args) > 3 else None)
        if None in options or (
            shuffle is not None and not (isinstance(shuffle, ast.Constant) and shuffle.value is True)
        ):
            continue
        if any(_feeds(program, call, home, loader) for home, loader in loaders):
            target = getattr(source.parent(call), "targets", [None])[0]
            name = source.code(target) if isinstance(target, (ast.Name, ast.Attribute)) else "sampler"
            yield RULE.finding(
                "this sampler shuffles but does not get the epoch: every epoch has the same order",
                source.place(call),
                f"{name}.set_epoch(epoch)  # first line of the loop over epochs",
            )


def _started_again(event: ProgramEvent) -> ast.expr | None:
    """Return the loader of ``iter(loader)`` where a loader has ended within the loop that trains."""
    call = event.node
    ended = any(isinstance(node, ast.ExceptHandler) for node, _, _ in event.arms)
    if (
        ended
        and isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "iter"
        and len(call.args) == 1
    ):
        return call.args[0]
    return None


def _feeds(program: ScriptProgram, sampler: ast.Call, source: SourceFile, loader: ast.expr) -> bool:
    """Return whether a loader that is iterated has this sampler."""
    return any(
        sampler is each.node
        for origin in program.origins(source, iterated(loader))
        for each in _samplers(program, origin)
    )


def _samplers(program: ScriptProgram, loader: ValueOrigin) -> list[ValueOrigin]:
    """Return the origins of what a call gets as ``sampler``."""
    if not isinstance(loader.node, ast.Call):
        return []
    handed = next((k.value for k in loader.node.keywords if k.arg == "sampler"), None)
    return program.origins(loader.source, handed) if handed is not None else []


def _endless(program: ScriptProgram) -> Iterator[Finding]:
    """Yield generators that start a loader again for ever, in a program of several ranks."""
    if program.mentions("IterableDataset") or not any(
        source.dotted(call.func).startswith("torch.distributed.")
        for source in program.sources
        for call in source.calls
    ):
        return
    for source in program.sources:
        for function in source.functions:
            for again, loader in restarts(source, function):
                made = [each for each in program.origins(source, loader) if isinstance(each.node, ast.Call)]
                samplers = [each for origin in made for each in _samplers(program, origin)]
                if made and not any(each.dotted in SAMPLERS for each in samplers):
                    continue
                if made or _named_loader(source, loader):
                    name = source.code(loader)
                    yield RULE.finding(
                        f"this starts `{name}` again and again, but never sets the epoch: with a DistributedSampler, every epoch has the "
                        "same order",
                        source.place(again),
                        f"{name}.sampler.set_epoch(epoch)  # before each start, with a counter of its own",
                    )


def restarts(source: SourceFile, function: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield where a generator starts an iterable in a loop without end, and the iterable."""
    nodes = [node for node in ast.walk(function) if source.function(node) is function]
    if not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in nodes):
        return
    for node in nodes:
        started = (
            node.iter
            if isinstance(node, ast.For)
            else node.value
            if isinstance(node, ast.YieldFrom)
            else node
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "iter"
            else None
        )
        loops = [each for each in source.parents(node) if isinstance(each, (ast.For, ast.While))]
        endless = bool(loops) and _without_end(source, loops[-1])
        loader = iterated(started) if started is not None else None
        if endless and isinstance(loader, (ast.Name, ast.Attribute)):
            yield node, loader


def _without_end(source: SourceFile, loop: ast.For | ast.While) -> bool:
    if isinstance(loop, ast.While):
        return isinstance(loop.test, ast.Constant)
    return isinstance(loop.iter, ast.Call) and source.dotted(loop.iter.func) == "itertools.count"


def _named_loader(source: SourceFile, loader: ast.expr) -> bool:
    """Return whether a name or its annotation says that it is a DataLoader."""
    annotations = [
        ast.unparse(binding.node.annotation)
        for binding in source.bindings(loader)
        if isinstance(binding.node, ast.arg) and binding.node.annotation is not None
    ]
    return any("DataLoader" in each for each in annotations) or "loader" in ast.unparse(loader).lower()


RULE = Rule("FL012", "set_epoch_missing", Severity.WRONG, __doc__, check)
