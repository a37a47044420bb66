"""Pinned batches are copied with a blocking copy.

What:
    The loader has `pin_memory=True`, but its batches are moved with `.to(device)` or `.cuda()` without
    `non_blocking=True`.
Why it matters:
    Pinning costs a copy in a thread of the loader. In return, the copy to the device can overlap with the
    host's work. Without `non_blocking=True`, the host waits for that copy anyway.
How to fix it:
    Use `x.to(device, non_blocking=True)`.
Example:
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Linear(4, 1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in DataLoader(torch.randn(64, 4), batch_size=8, pin_memory=True):
  -     x = x.to("cuda")  # <-
  +     x = x.to("cuda", non_blocking=True)
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
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.value_paths import iterated
from flatout.probe.values import ValueOrigin
from flatout.schema.findings import Finding, Severity


def check(program: ScriptProgram) -> Iterator[Finding]:
    for event, loader in batches_moved(program):
        assert isinstance(event.node, ast.Call)
        if pins(loader) is True and not non_blocking(event.node):
            call = event.source.code(event.node)
            info = call[:-1] + (", " if event.node.args or event.node.keywords else "") + "non_blocking=True)"
            yield RULE.finding(
                f"the loader on line {loader.source.place(loader.node).line} pins its batches, but `{call}` waits for the copy anyway",
                event.place,
                info,
                others=[loader.source.place(loader.node)],
                edits=add_argument(event.source, event.node, "non_blocking=True"),
            )
    for event, shown in moved_from_given_loader(program):
        assert isinstance(event.node, ast.Call)
        if not non_blocking(event.node):
            call = event.source.code(event.node)
            yield RULE.finding(
                f"`{shown}` is given by the caller: if it pins its batches, `{call}` waits for the copy anyway",
                event.place,
                f"{call[:-1]}{', ' if event.node.args or event.node.keywords else ''}non_blocking=True)",
                edits=add_argument(event.source, event.node, "non_blocking=True"),
            )


def moved_from_given_loader(program: ScriptProgram) -> Iterator[tuple[ProgramEvent, str]]:
    """Yield where a trainer class moves a batch to a device, with the loader that its caller passes."""
    for loop in program.step_loops:
        node = loop.loop.node
        loader = iterated(node.iter) if isinstance(node, (ast.For, ast.AsyncFor)) else None
        if (
            isinstance(loader, ast.Attribute)
            and isinstance(loader.value, ast.Name)
            and loader.value.id == "self"
            and "loader" in loader.attr.lower()
            and all(isinstance(origin.node, ast.arg) for origin in program.origins(loop.source, loader))
        ):
            for event in _moves(program, loop):
                yield event, loop.source.code(loader)


def batches_moved(program: ScriptProgram) -> Iterator[tuple[ProgramEvent, ValueOrigin]]:
    """Yield where a training loop moves a batch to a device, with the loader of the batch."""
    for loop in program.step_loops:
        if not isinstance(loop.loop.node, (ast.For, ast.AsyncFor)):
            continue
        loaders = program.origins(loop.source, iterated(loop.loop.node.iter))
        if len(loaders) != 1 or not loaders[0].dotted.endswith("data.DataLoader"):
            continue
        for event in _moves(program, loop):
            yield event, loaders[0]


def _moves(program: ScriptProgram, loop: StepLoop) -> Iterator[ProgramEvent]:
    """Yield where a loop moves its own variable, or an entry of it, to a device."""
    for event in loop.of("call"):
        call = event.node
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in ("to", "cuda")
            and not event.source.dotted(call.func)
        ):
            origins = program.origins(event.source, call.func.value)
            if (
                origins
                and all(
                    origin.node is loop.loop.node or _inside(origin.node, loop.loop.node)
                    for origin in origins
                )
                and _to_device(call)
            ):
                yield event


def _inside(node: ast.AST, loop: ast.AST) -> bool:
    """Return whether a value is an entry of the loop variable: ``batch[0]``."""
    return (
        isinstance(node, ast.Subscript)
        and isinstance(node.value, ast.Name)
        and node.value.id
        in {each.id for each in ast.walk(getattr(loop, "target", node)) if isinstance(each, ast.Name)}
    )


def _to_device(call: ast.Call) -> bool:
    """Return whether a call moves a tensor to a device: ``x.to(torch.float32)`` does not."""
    first = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == "device"), None)
    if isinstance(call.func, ast.Attribute) and call.func.attr == "cuda":
        return True
    return (
        first is not None
        and "float" not in ast.unparse(first)
        and "long" not in ast.unparse(first)
        and "int" not in ast.unparse(first)
        and not (isinstance(first, ast.Constant) and first.value == "cpu")
    )


def pins(loader: ValueOrigin) -> bool | None:
    """Return whether a loader pins its batches, or None if the source does not show it."""
    assert isinstance(loader.node, ast.Call)
    options = {keyword.arg: keyword.value for keyword in loader.node.keywords}
    if None in options or len(loader.node.args) > 7:
        return None
    given = options.get("pin_memory")
    return False if given is None else bool(given.value) if isinstance(given, ast.Constant) else None


def non_blocking(call: ast.Call) -> bool:
    given = next((k.value for k in call.keywords if k.arg in ("non_blocking", None)), None)
    return len(call.args) > 1 or (
        given is not None and not (isinstance(given, ast.Constant) and given.value is False)
    )


RULE = Rule(
    "FL109",
    "pinned_and_blocking",
    Severity.TIME,
    __doc__,
    check,
    levers=("device_prefetch",),
    fix_changes="",
)
