"""A running total keeps the graph of every step.

What:
    The training loop has `total += loss` or `losses.append(loss)`, directly or in a method of a metric object.
    `total` and `losses` outlive the step, and `loss` is a tensor with its graph.
Why it matters:
    A total of tensors is part of a graph that references the graphs of all previous steps. Memory grows with
    every step, often so slowly that it runs out only after hours.
How to fix it:
    Use `total += loss.detach()`, which stays on the device and does not wait, or `loss.item()`.
Example:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
  -     total += loss  # <-
  +     total += loss.detach()
    print(total / 100)
Sources:
    https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
"""

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.losses import call_with_loss, graph_of
from flatout.diagnose.memory_growth import growth_finding
from flatout.diagnose.rewrites import insert_after
from flatout.diagnose.rule import Rule
from flatout.probe.contexts import without_gradients
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop, implies
from flatout.probe.stores import is_store
from flatout.probe.value_paths import flat
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def check_source(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.steps:
        for event in loop.events:
            for reaper, kept in _held(program, loop, event):
                if not _backward(loop, reaper) and _outlives(program, loop, event, reaper):
                    yield from _kept(program, loop, event, reaper, kept)


def _kept(
    program: ScriptProgram, loop: StepLoop, event: ProgramEvent, reaper: ast.expr, kept: ast.expr
) -> Iterator[Finding]:
    graph = graph_of(program, loop, event, kept)
    if graph is None:
        yield from _indirectly(program, loop, event, reaper, kept)
        return
    into, name = event.source.code(reaper), event.source.code(graph)
    yield RULE.finding(
        f"`{into}` keeps `{name}` with its whole graph: {_growth(loop, event, reaper)}",
        event.place,
        event.source.code(event.node).replace(name, f"{name}.detach()")
        if event.kind == "call" or isinstance(getattr(event.node, "targets", [None])[0], ast.Subscript)
        else f"{into} += {event.source.code(kept).replace(name, name + '.detach()')}",
        edits=insert_after(event.source, graph, ".detach()"),
    )


def _indirectly(
    program: ScriptProgram, loop: StepLoop, event: ProgramEvent, reaper: ast.expr, kept: ast.expr
) -> Iterator[Finding]:
    """Find a loss that a method of the program keeps, and outputs that are kept together with their loss."""
    into, shown = event.source.code(reaper), event.source.code(kept)
    if without_gradients(event):
        return
    loss = _loss_in(loop, event, kept)
    if loss is not None:
        name = event.source.code(loss)
        yield RULE.finding(
            f"`{into}` keeps `{shown}`, and with it the whole graph of `{name}`: {_growth(loop, event, reaper)}",
            event.place,
            f"{name} = {name}.detach()  # before it is kept",
        )
        return
    call = call_with_loss(program, loop, event.source, kept)
    if call is not None and not _made_in_each_pass(program, loop, call):
        yield RULE.finding(
            f"`{into}` keeps the loss that `{call.source.code(given_by(call))}` gives it, with its whole graph: "
            f"{_growth(loop, event, reaper)}",
            event.place,
            "detach the value before it is added: `.detach()`",
            others=[call.place],
        )


def given_by(call: ProgramEvent) -> ast.AST:
    """Return the call, or the assignment ``stats["loss"] = loss`` that calls ``__setitem__``."""
    return call.source.parent(call.node) if is_store(call.node) else call.node  # type: ignore[return-value]


def _made_in_each_pass(program: ScriptProgram, loop: StepLoop, call: ProgramEvent) -> bool:
    """Return whether each pass creates the object whose method keeps the loss."""
    function = call.node.func if isinstance(call.node, ast.Call) else None
    owner = function.value if isinstance(function, ast.Attribute) else None
    inside = {id(event.node) for event in loop.events}
    return owner is not None and any(
        id(origin.node) in inside for origin in program.origins(call.source, owner)
    )


def _held(program: ScriptProgram, loop: StepLoop, event: ProgramEvent) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield containers with kept values: ``total += loss``, ``total = total + loss``, ``kept.append(loss)``."""
    node = event.node
    reaper: ast.expr | None = None
    value: ast.expr | None = None
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        reaper, value = node.target, node.value
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp):
        if isinstance(node.value.op, ast.Add) and ast.unparse(node.value.left) == ast.unparse(
            node.targets[0]
        ):
            reaper, value = node.targets[0], node.value.right
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
        if _grows(program, loop, event, node.targets[0]):
            reaper, value = node.targets[0].value, node.value
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("append", "extend", "appendleft")
        and len(node.args) == 1
    ):
        reaper, value = node.func.value, node.args[0]
    if reaper is None or value is None:
        return
    entries = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [value])
    yield from ((reaper, each) for each in entries)


def _grows(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, target: ast.Subscript) -> bool:
    """Return whether ``losses[step] = loss`` has a new index in each pass, and keeps tensors as they are."""
    names = {node.id for node in ast.walk(target.slice) if isinstance(node, ast.Name)}
    counted = {
        node.id
        for node in ast.walk(loop.loop.node)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    made = program.origins(event.source, target.value)
    return (
        event.source is loop.source
        and bool(names & counted)
        and not any(isinstance(node, (ast.Mod, ast.Call)) for node in ast.walk(target.slice))
        and all(
            isinstance(origin.node, (ast.Dict, ast.List, ast.BinOp)) and not origin.part for origin in made
        )
    )


def _loss_in(loop: StepLoop, event: ProgramEvent, kept: ast.expr) -> ast.expr | None:
    """Return the loss that is an entry of the kept value: ``output["loss"]`` of ``output``."""
    names = event.source.names
    for backward in loop.of("backward"):
        loss = backward.subject
        inside = loss.value if isinstance(loss, (ast.Subscript, ast.Attribute)) else None
        if (
            loss is not None
            and isinstance(inside, ast.Name)
            and isinstance(kept, ast.Name)
            and inside.id == kept.id != "self"
            and backward.source is event.source
            and names.reaching(inside) == names.reaching(kept)
            and not any(_replaces(each, loss) for each in loop.events)
        ):
            return loss
    return None


def _replaces(event: ProgramEvent, loss: ast.expr) -> bool:
    node = event.node
    return isinstance(node, ast.Assign) and any(ast.unparse(t) == ast.unparse(loss) for t in node.targets)


def _backward(loop: StepLoop, reaper: ast.expr) -> bool:
    """Return whether the container is itself used for a backward pass."""
    return any(
        event.subject is not None
        and any(
            ast.unparse(node) == ast.unparse(reaper)
            for node in ast.walk(event.subject)
            if isinstance(node, ast.expr)
        )
        for event in loop.of("backward")
    )


def _sets(event: ProgramEvent, reaper: ast.expr) -> bool:
    return isinstance(event.node, ast.Assign) and any(
        ast.unparse(target) == ast.unparse(reaper) for target in flat(event.node.targets)
    )


def _growth(loop: StepLoop, event: ProgramEvent, reaper: ast.expr) -> str:
    """Return how long the memory grows: a total may be set to zero whenever the optimizer steps."""
    reset = any(
        _sets(each, reaper) and each.node is not event.node and implies(step, each)
        for each in loop.events
        for step in loop.of("step", "scaler_step")
    )
    return "memory grows with every " + ("micro-batch until the step" if reset else "step")


def _outlives(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, reaper: ast.expr) -> bool:
    """Return whether the container is created outside the loop: nothing in a pass resets it, or bounds it."""
    for origin in program.origins(event.source, reaper):
        if isinstance(origin.node, ast.Call) and any(k.arg == "maxlen" for k in origin.node.keywords):
            return False
    for each in loop.events:
        if _sets(each, reaper) and each.node is not event.node and loop.always(each):
            return False
    function = event.source.function(event.node)
    around = list(event.source.parents(event.node))
    if function in around and not any(node is loop.loop.node for node in around[: around.index(function)]):
        whole = reaper
        while isinstance(whole, ast.Subscript):
            whole = whole.value
        return not isinstance(whole, ast.Name)  # a name is local to a function that is called in each step
    return True


def check_profile(profile: ProfileRecord) -> Iterable[Finding]:
    if profile.tensor_growth is not None and profile.tensor_growth.leaking and profile.tensor_growth.graph:
        yield growth_finding(RULE, profile, profile.tensor_growth, "with its graph")


RULE = Rule(
    "FL202",
    "loss_kept_with_graph",
    Severity.MEMORY,
    __doc__,
    check_source,
    check_profile,
    fix_changes="",
    sort_before=Severity.TIME,
)
