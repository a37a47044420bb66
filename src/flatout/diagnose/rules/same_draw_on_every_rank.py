"""Every rank uses the same random draw.

What:
    A random number of a training step, such as a noise level or a time step, is drawn and then broadcast from
    rank 0 to all ranks. It is applied to data of the rank together with noise that each rank draws itself.
Why it matters:
    Each rank has its own samples, so the ranks together are one large batch. With a common draw, this batch has a
    single noise level instead of one per rank. The gradient has more variance, and more ranks do not lower it.
How to fix it:
    Remove the broadcast: each rank draws with its own seed. Only ranks that share one sample, as in tensor or
    sequence parallelism, need the same draw: broadcast in their group, not in the world.
Example:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(100):
        clean = torch.randn(8, 4)
  -     level = torch.rand(1)
  -     dist.broadcast(level, src=0)  # <-
  +     level = torch.rand(8, 1)
        noise = torch.randn_like(clean)
        noisy = torch.lerp(clean, noise, level)
        optimizer.zero_grad()
        (model(noisy) - noise).square().mean().backward()
        optimizer.step()
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import position
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.schema.findings import Finding, Severity

DRAWS = {
    "rand",
    "randn",
    "randint",
    "normal",
    "rand_like",
    "randn_like",
    "randint_like",
    "randperm",
    "bernoulli",
}
CHOOSES = ("item", "tolist", "cpu", "numpy")  # what follows is a choice that all ranks make alike


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source, call in [*program.method_calls("broadcast"), *program.calls("accelerate.utils.broadcast")]:
        sent = call.args[0] if call.args else None
        if not isinstance(sent, ast.Name) or not _from_rank_0(program, source, call):
            continue
        drawn = _draw(source, sent)
        function = source.function(call) or source.tree
        if drawn is None or _chooses(source, function, sent):
            continue
        if _meets_own_noise(source, function, sent):
            yield RULE.finding(
                f"`{sent.id}` is random, but rank 0 sends its draw to all ranks: they train at one value instead of one each",
                source.place(call),
                f"# remove {source.code(call)}",
                others=[source.place(drawn)],
            )


def _from_rank_0(program: ScriptProgram, source: SourceFile, call: ast.Call) -> bool:
    """Return whether a broadcast goes from rank 0 to the world, not to the ranks of a group."""
    options = {keyword.arg: keyword.value for keyword in call.keywords}
    if source.dotted(call.func) == "accelerate.utils.broadcast":
        return "from_process" not in options and len(call.args) == 1  # of process 0, to all
    sender = options.get("src", call.args[1] if len(call.args) > 1 else None)
    if not isinstance(call.func, ast.Attribute) or not isinstance(sender, ast.Constant) or sender.value != 0:
        return False
    if source.dotted(call.func) == "torch.distributed.broadcast":
        group = options.get("group", call.args[2] if len(call.args) > 2 else None)
        return group is None or source.code(group) in (
            "None",
            "dist.group.WORLD",
            "torch.distributed.group.WORLD",
        )
    return not source.dotted(call.func) and any(
        "world" in ast.unparse(origin.node).lower() for origin in program.origins(source, call.func.value)
    )


def _draw(source: SourceFile, name: ast.Name) -> ast.Call | None:
    """Return the call that draws the value of a name, if it has no other."""
    bindings = source.names.reaching(name)
    value = bindings[0].value if len(bindings) == 1 and not bindings[0].path else None
    return value if isinstance(value, ast.Call) and _draws(source, value) else None


def _draws(source: SourceFile, call: ast.Call) -> bool:
    package, _, name = source.dotted(call.func).rpartition(".")
    return package == "torch" and name in DRAWS


def _chooses(source: SourceFile, function: ast.AST, sent: ast.Name) -> bool:
    """Return whether the draw decides what the program does: a branch, a length, an index."""
    for each in _uses(function, sent.id):
        for above in source.parents(each):
            if above is function or (
                isinstance(above, ast.stmt) and not isinstance(above, (ast.If, ast.While))
            ):
                break
            if isinstance(above, (ast.If, ast.While, ast.IfExp, ast.Subscript, ast.Compare)):
                return True
            if isinstance(above, ast.Attribute) and above.attr in CHOOSES:
                return True
            if isinstance(above, ast.Call) and getattr(above.func, "id", "") in (
                "int",
                "range",
                "float",
                "bool",
            ):
                return True
    return False


def _meets_own_noise(source: SourceFile, function: ast.AST, sent: ast.Name) -> bool:
    """Return whether a call uses the draw together with another draw, which each rank makes itself."""
    for each in ast.walk(function):
        if isinstance(each, ast.Call) and position(each) > position(sent):
            names = [node for node in ast.walk(each) if isinstance(node, ast.Name)]
            if any(node.id == sent.id for node in names) and any(
                node.id != sent.id and _random(source, function, node) for node in names
            ):
                return True
    return False


def _random(source: SourceFile, function: ast.AST, name: ast.Name) -> bool:
    """Return whether a name is random and never broadcast in the function."""
    own = any(
        isinstance(binding.value, ast.Call) and _draws(source, binding.value)
        for binding in source.names.lookup(name)
    )
    return own and not any(
        isinstance(source.parent(each), ast.Call) and "broadcast" in ast.unparse(source.parent(each).func)  # type: ignore[union-attr]
        for each in _uses(function, name.id)
    )


def _uses(function: ast.AST, name: str) -> list[ast.Name]:
    return [
        each
        for each in ast.walk(function)
        if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load)
    ]


RULE = Rule("FL039", "same_draw_on_every_rank", Severity.WRONG, __doc__, check)
