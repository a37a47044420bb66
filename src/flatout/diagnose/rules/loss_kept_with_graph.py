"""A running total keeps the graph of every step.

What:
    The training loop has `total += loss` or `losses.append(loss)`, directly or in a method of a metric object.
    `total` and `losses` outlive the step, and `loss` is a tensor with its graph.
Why it matters:
    A total of tensors is part of a graph that references the graphs of all previous steps. Memory grows with
    every step, often so slowly that it runs out only after hours.
How to fix it:
    Use `total += loss.detach()`, which stays on the device and does not wait, or `loss.item()`.
Bad:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        total += loss  # <-
    print(total / 100)
Good:
    import torch

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    total = 0.0
    for _ in range(100):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    print(total / 100)
Sources:
    https://docs.pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from flatout.diagnose.memory_growth import growing
from flatout.diagnose.rewrites import insert_after
from flatout.diagnose.rule import Rule
from flatout.probe.names import FUNCTIONS, Binding
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop, implies
from flatout.probe.value_paths import flat
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord

# Methods whose result has the graph of their object, and functions whose result has that of their argument.
KEEP_GRAPH = {
    "cpu",
    "cuda",
    "to",
    "float",
    "double",
    "half",
    "mean",
    "sum",
    "clone",
    "squeeze",
    "view",
    "reshape",
}
DIFFERENTIABLE = {"horovod.torch.allreduce"}


def look(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.events:
            held = _held(event)
            if held is None:
                continue
            reaper, kept = held
            if _backward(loop, reaper) or not _outlives(program, loop, event, reaper):
                continue
            graph = _graph(program, loop, event, kept)
            if graph is not None:
                into, name = event.source.code(reaper), event.source.code(graph)
                yield RULE.finding(
                    f"`{into}` keeps `{name}` with its whole graph: {_growth(loop, event, reaper)}",
                    event.place,
                    event.source.code(event.node).replace(name, f"{name}.detach()")
                    if event.kind == "call"
                    else f"{into} += {event.source.code(kept).replace(name, name + '.detach()')}",
                    edits=insert_after(event.source, graph, ".detach()"),
                )
            else:
                yield from _indirectly(program, loop, event, reaper, kept)


def _indirectly(
    program: ScriptProgram, loop: StepLoop, event: ProgramEvent, reaper: ast.expr, kept: ast.expr
) -> Iterator[Finding]:
    """Find a loss that a method of the program keeps, and outputs that are kept together with their loss."""
    into, shown = event.source.code(reaper), event.source.code(kept)
    if _without_graph(event):
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
    call = loss_given(program, loop, event.source, kept)
    if call is not None:
        yield RULE.finding(
            f"`{into}` keeps the loss that `{call.source.code(call.node)}` gives it, with its whole graph: "
            f"{_growth(loop, event, reaper)}",
            event.place,
            "detach the value before it is added: `.detach()`",
            others=[call.place],
        )


def _held(event: ProgramEvent) -> tuple[ast.expr, ast.expr] | None:
    """Return container and kept value: ``total += loss``, ``total = total + loss``, ``kept.append(loss)``."""
    node = event.node
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
        return node.target, node.value
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.BinOp)
        and isinstance(node.value.op, ast.Add)
        and ast.unparse(node.value.left) == ast.unparse(node.targets[0])
    ):
        return node.targets[0], node.value.right
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append"
        and len(node.args) == 1
    ):
        return node.func.value, node.args[0]
    return None


def _graph(program: ScriptProgram, loop: StepLoop, event: ProgramEvent, kept: ast.expr) -> ast.expr | None:
    """Return the loss in the kept value if it still has its graph, alone or scaled by numbers."""
    if isinstance(kept, ast.BinOp) and isinstance(kept.op, (ast.Mult, ast.Div)):
        return _graph(program, loop, event, kept.left) or _graph(program, loop, event, kept.right)
    if (isinstance(kept, ast.Attribute) and kept.attr in ("data", "grad")) or not isinstance(
        kept, (ast.Name, ast.Attribute)
    ):
        return None
    if _without_graph(event):
        return None
    for backward in loop.of("backward"):
        if (
            backward.subject is None
            or backward.source is not event.source
            or ast.dump(backward.subject) != ast.dump(kept)
        ):
            continue
        if event.source.function(event.node) is event.source.function(backward.node) and not _detached(
            event, kept
        ):
            return kept
    return None


def _without_graph(event: ProgramEvent) -> bool:
    """Return whether the event runs under ``torch.no_grad()``, as a block or as a decorator."""
    functions = [block.func if isinstance(block, ast.Call) else block for _, block in event.blocks]
    return any(getattr(each, "attr", "") in ("no_grad", "inference_mode") for each in functions)


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


def loss_given(
    program: ScriptProgram, loop: StepLoop, source: SourceFile, node: ast.AST, depth: int = 0
) -> ProgramEvent | None:
    """Return the call in this loop that passes the loss, with its graph, for the parameter in an expression."""
    if depth > 6:
        return None
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        return loss_given(program, loop, source, node.left, depth + 1) or loss_given(
            program, loop, source, node.right, depth + 1
        )
    if isinstance(node, ast.Call):
        if source.dotted(node.func) in DIFFERENTIABLE and node.args:
            return loss_given(program, loop, source, node.args[0], depth + 1)
        if isinstance(node.func, ast.Attribute) and node.func.attr in KEEP_GRAPH:
            return loss_given(program, loop, source, node.func.value, depth + 1)
    bindings = source.names.reaching(node) if isinstance(node, ast.Name) else []
    if len(bindings) != 1:
        return None
    if bindings[0].how == "assign" and bindings[0].value is not None and not bindings[0].path:
        return loss_given(program, loop, source, bindings[0].value, depth + 1)
    function = source.function(node)
    if bindings[0].how != "parameter" or function is None:
        return None
    callers = {id(call) for _, call in program.callers(function)}
    for call in loop.of("call"):
        if id(call.node) in callers and not _without_graph(call):
            given = argument(function, call, ast.unparse(node))
            if given is not None and (
                _graph(program, loop, call, given) or loss_given(program, loop, call.source, given, depth + 1)
            ):
                return call
    return None


def argument(function: ast.AST, call: ProgramEvent, name: str) -> ast.expr | None:
    """Return what a call passes for the parameter of this name."""
    assert isinstance(function, FUNCTIONS)
    assert isinstance(call.node, ast.Call)
    names = [a.arg for a in [*function.args.posonlyargs, *function.args.args]]
    names = names[1:] if names[:1] == ["self"] else names
    given = next((keyword.value for keyword in call.node.keywords if keyword.arg == name), None)
    position = names.index(name) if name in names else len(call.node.args)
    if given is not None or position >= len(call.node.args):
        return given
    starred = any(isinstance(each, ast.Starred) for each in call.node.args)
    return None if starred else call.node.args[position]


def _detached(event: ProgramEvent, kept: ast.expr) -> bool:
    """Return whether the name gets a value without a graph before it is kept: ``loss = loss.item()``."""
    bindings: list[Binding] = event.source.names.reaching(kept) if isinstance(kept, ast.Name) else []
    return any(
        isinstance(b.value, ast.Call)
        and isinstance(b.value.func, (ast.Attribute, ast.Name))
        and (
            getattr(b.value.func, "attr", "") in ("item", "detach", "cpu", "numpy")
            or getattr(b.value.func, "id", "") == "float"
        )
        for b in bindings
        if b.value is not None
    )


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
    in_a_loop = (
        any(isinstance(node, (ast.For, ast.AsyncFor, ast.While)) for node in around[: around.index(function)])
        if function in around
        else True
    )
    return in_a_loop or not isinstance(
        reaper, ast.Name
    )  # otherwise it is local to a function called in each step


def judge(profile: ProfileRecord) -> Iterable[Finding]:
    if profile.leak is not None and profile.leak.leaking and profile.leak.graph:
        yield growing(RULE, profile, profile.leak, "with its graph")


RULE = Rule(
    "FL202",
    "loss_kept_with_graph",
    Severity.MEMORY,
    __doc__,
    look=look,
    judge=judge,
    fix_changes="",
    before=Severity.TIME,
)
