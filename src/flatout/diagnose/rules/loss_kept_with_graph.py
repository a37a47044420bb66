"""A running total keeps the graph of every step.

What:
    The training loop has `total += loss` or `losses.append(loss)`. `total` and `losses` outlive the step, and
    `loss` is a tensor with its graph.
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
from flatout.probe.names import Binding
from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Finding, Severity
from flatout.schema.profile import ProfileRecord


def look(program: ScriptProgram) -> Iterator[Finding]:
    for loop in program.step_loops:
        for event in loop.events:
            held = _held(event)
            if held is None:
                continue
            reaper, kept = held
            graph = _graph(program, loop, event, kept)
            if graph is not None and not _backward(loop, reaper) and _outlives(loop, event, reaper):
                into, name = event.source.code(reaper), event.source.code(graph)
                yield RULE.finding(
                    f"`{into}` keeps `{name}` with its whole graph: memory grows with every step",
                    event.place,
                    event.source.code(event.node).replace(name, f"{name}.detach()")
                    if event.kind == "call"
                    else f"{into} += {event.source.code(kept).replace(name, name + '.detach()')}",
                    edits=insert_after(event.source, graph, ".detach()"),
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
    if any(
        block.func.attr == "no_grad"
        for _, block in event.blocks
        if isinstance(block, ast.Call) and isinstance(block.func, ast.Attribute)
    ):
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


def _outlives(loop: StepLoop, event: ProgramEvent, reaper: ast.expr) -> bool:
    """Return whether the container is created outside the loop: nothing in a pass resets it."""
    for each in loop.events:
        if isinstance(each.node, ast.Assign) and each.node is not event.node and loop.always(each):
            for target in each.node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                if any(ast.unparse(name) == ast.unparse(reaper) for name in names):
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


RULE = Rule("FL202", "loss_kept_with_graph", Severity.MEMORY, __doc__, look=look, judge=judge, fix_changes="")
