"""Every step waits for the device.

What:
    Every step fetches a value from the device: `loss.item()`, `float(loss)`, `.cpu()`, `.numpy()`,
    `.tolist()`, printing a tensor, `if mask.sum() > 0` in a loss function, or any of these in the `step` of an
    own optimizer.
Why it matters:
    The host queues work ahead of the device. To read a value, it must wait until all queued work is done. The
    device then idles until the host has queued more. With small steps, this takes a large share of the time.
    (On a CPU it costs nothing.)
How to fix it:
    Keep a running total on the device (`total += loss.detach()`), and fetch it every hundred steps or once
    per epoch. With the lever `early_values`, a read after the backward pass waits only for the forward pass.
Example:
    import torch

    device = torch.device("cuda")
    model = torch.nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
  - total = 0.0
  + total = torch.zeros((), device=device)
    for step in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4, device=device)).square().mean()
        loss.backward()
        optimizer.step()
  -     total += loss.item()  # <-
  +     total += loss.detach()
  +     if step % 10 == 0:
  +         print(total.item())
Sources:
    https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html#avoid-unnecessary-cpu-gpu-synchronization
"""

import ast
from collections.abc import Callable, Iterable, Iterator

from flatout.diagnose.device_sums import device_sum
from flatout.diagnose.evaluation_reads import evaluation_reads
from flatout.diagnose.gains import (
    HOW_BY_TIME,
    certain_gain,
    format_ms,
    how_by_what_if,
    share_of_step,
    speedup_without,
    synchronisations,
    was_measured,
)
from flatout.diagnose.loss_reads import loss_reads
from flatout.diagnose.optimizer_reads import optimizer_reads
from flatout.diagnose.rule import Rule
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.probe.values import ValueOrigin
from flatout.probe.walk import CLIPS
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

KINDS = ("item", "nonzero", "to host", "numpy", "compare", "tolist", "synchronize")

FETCHES = {"item", "cpu", "numpy", "tolist"}
CASTS = {"float", "int", "bool"}
LOSSES = ("loss", "criterion", "entropy")  # words in the names of functions that return a tensor


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    yield from _in_losses(program)
    yield from _in_optimizers(program)
    if not program.uses_device:
        return
    for loop in program.steps:
        info = set()  # one finding per statement: only the first wait costs time
        for event in loop.of("call"):
            tensor = fetched(event)
            statement = id(event.source.statement(event.node))
            if (
                tensor is not None
                and statement not in info
                and (loop.steady(event) or _each_gradient(loop, event, tensor))
                and from_step(program, loop, event.source, tensor)
            ):
                info.add(statement)
                shown, name = event.source.code(event.node), event.source.code(tensor)
                fix = f"{name}.detach()  # sum on the device, and fetch every hundred steps"
                yield RULE.finding(
                    f"`{shown}` waits in every step until the device has finished all queued work",
                    event.place,
                    fix,
                    edits=device_sum(program, loop, event),
                )
        yield from _compared(program, loop)
    for event, tensor in evaluation_reads(program, fetched, _of_the_batch(program)):
        yield RULE.finding(
            f"`{event.source.code(event.node)}` waits for the device in each batch of the validation",
            event.place,
            f"{event.source.code(tensor)}  # keep it on the device, and fetch the mean after the loop",
            weight=-1,
        )


def _of_the_batch(program: ScriptProgram) -> Callable[[ProgramEvent, StepLoop, ast.expr], bool]:
    return lambda event, loop, tensor: from_step(program, loop, event.source, tensor)


def _in_losses(program: ScriptProgram) -> Iterator[Finding]:
    """Find reads inside loss functions. A module that is checked alone does not show its device."""
    if program.uses_device or not program.step_loops:
        for source, node, fix in loss_reads(program):
            yield RULE.finding(
                f"`{source.code(node)}` waits for the device, each time the loss is computed",
                source.place(node),
                fix,
            )


def _in_optimizers(program: ScriptProgram) -> Iterator[Finding]:
    """Find reads in the step of an optimizer of the program, which has no training loop of its own."""
    for source, node, tensor, for_each in optimizer_reads(program):
        when = "for each parameter, in every step" if for_each else "in every step"
        name = source.code(tensor)
        yield RULE.finding(
            f"`{source.code(node)}` waits {when} until the device has finished all queued work",
            source.place(node),
            f"{name}  # keep it on the device; operators and comparisons work on tensors, too",
            weight=0 if for_each else -1,
        )


def _of_gradient(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == "grad" for each in ast.walk(node))


def _each_gradient(loop: StepLoop, event: ProgramEvent, tensor: ast.expr) -> bool:
    """Return whether a call reads a value of each parameter's gradient, in a loop inside the step."""
    return _of_gradient(tensor) and not loop.arms(event)


def _compared(program: ScriptProgram, loop: StepLoop) -> Iterator[Finding]:
    """Find comparisons such as `if loss < best:`, which also fetch the value."""
    source, top = loop.loop.source, loop.loop.node
    for node in ast.walk(top):
        if not (
            isinstance(node, ast.If) and source.parent(node) is top and isinstance(node.test, ast.Compare)
        ):
            continue
        if all(
            isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)) for op in node.test.ops
        ) and any(
            from_step(program, loop, source, side) for side in (node.test.left, *node.test.comparators)
        ):
            yield RULE.finding(
                f"`if {source.code(node.test)}` waits in every step until the device has finished all queued work",
                source.place(node),
                "torch.minimum(best, loss.detach()), or compare every hundred steps",
            )


def fetched(event: ProgramEvent) -> ast.expr | None:
    """Return the tensor whose value a call fetches."""
    call = event.node
    if not isinstance(call, ast.Call):
        return None
    if (
        isinstance(call.func, ast.Attribute)
        and call.func.attr in FETCHES
        and not call.args
        and not event.source.dotted(call.func)
    ):
        inner = call.func.value
        # x.detach().cpu().numpy() is one wait: report it once, where it happens
        nested = (
            isinstance(inner, ast.Call)
            and isinstance(inner.func, ast.Attribute)
            and inner.func.attr in FETCHES
        )
        return None if nested else inner
    if (
        isinstance(call.func, ast.Name)
        and call.func.id in CASTS | {"print"}
        and len(call.args) >= 1
        and not event.source.names.lookup(call.func)
    ):
        return next((each for each in call.args if isinstance(each, ast.Name)), None)
    return None


def from_step(
    program: ScriptProgram, loop: StepLoop, source: SourceFile, node: ast.AST, depth: int = 0
) -> bool:
    """Return whether a value comes from the model or loss of this step, which the device still computes."""
    if depth > 8:
        return False
    losses = [(event.source, event.subject) for event in loop.of("backward") if event.subject is not None]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in FETCHES:
        return False
    if _of_gradient(node):
        return True
    return any(program.values.same(source, node, home, loss) for home, loss in losses) or any(
        _made_by_model(program, loop, origin, depth) for origin in program.origins(source, node)
    )


def _made_by_model(program: ScriptProgram, loop: StepLoop, origin: ValueOrigin, depth: int) -> bool:
    node, source = origin.node, origin.source
    if isinstance(node, ast.BinOp):
        return from_step(program, loop, source, node.left, depth + 1) or from_step(
            program, loop, source, node.right, depth + 1
        )
    if isinstance(node, ast.Compare):
        return from_step(program, loop, source, node.left, depth + 1)
    if isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
        return from_step(program, loop, source, node.value, depth + 1)
    if not isinstance(node, ast.Call):
        return False
    if "Module" in program.values.kinds(source, node.func):
        return True
    if isinstance(node.func, ast.Attribute) and not source.dotted(node.func):
        if node.func.attr in CLIPS:
            return True
        return node.func.attr not in FETCHES | {"size", "dim", "numel"} and from_step(
            program, loop, source, node.func.value, depth + 1
        )
    name = source.dotted(node.func)
    if name.rpartition(".")[2] in CLIPS:
        return True  # the norm of the gradients
    return (name.startswith("torch.") or any(word in name.lower() for word in LOSSES)) and any(
        from_step(program, loop, source, each, depth + 1) for each in node.args
    )


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    seen = [c for c in synchronisations(profile, *KINDS) if c.place is not None and c.calls >= 0.5]
    total = sum(c.ms for c in seen)
    what_if = certain_gain(profile, "syncs")
    ratio = what_if or (
        None
        if was_measured(profile, "syncs") and profile.device != "cpu"
        else speedup_without(profile, total)
    )
    if not seen or ratio is None:
        return
    evidence = [
        f"{c.place.sentence()}: {c.kind}, {c.calls:.3g} times per {profile.unit}, {format_ms(c.ms)}"
        for c in seen[:6]
        if c.place
    ]
    yield RULE.profile_finding(
        f"waiting for values takes {share_of_step(profile, total)}, most of it here",
        [c.place for c in seen],
        evidence=evidence,
        predicted=ratio,
        how=how_by_what_if("syncs") if what_if else HOW_BY_TIME,
    )


RULE = Rule(
    "FL101",
    "host_sync_every_step",
    Severity.TIME,
    __doc__,
    check_source,
    check_profile,
    levers=("early_values",),
    fix_changes="",
    replaced_at_its_line_by=("logging_cost",),
)
