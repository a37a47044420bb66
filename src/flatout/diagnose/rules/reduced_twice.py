"""A value is summed over the ranks twice.

What:
    `all_reduce` overwrites its tensor with the sum over all ranks. The same tensor is reduced again although it has
    no new content. Or a running total is reduced in each pass of the loop that adds to it.
Why it matters:
    The second sum multiplies what is already a sum by the number of ranks. A metric becomes too large, by a factor
    that depends on the number of ranks, and a total grows exponentially.
How to fix it:
    Reduce each tensor once: the total after the loop, or the new value of a pass before it is added.
Example:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.zeros(1)
    for x in torch.randn(10, 8, 4):
        total += x.square().mean()
  -     dist.all_reduce(total)  # <-
  + dist.all_reduce(total)
    print(total / 10 / dist.get_world_size())
Sources:
    https://docs.pytorch.org/docs/stable/distributed.html#collective-functions
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import FUNCTIONS, position
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import flat
from flatout.schema.findings import Finding, Severity

COLLECTIVES = ("all_reduce", "reduce")
LOOPS = (ast.For, ast.AsyncFor, ast.While)
QUIET = (
    "barrier",
    "print",
    "wait",
    "info",
    "debug",
    "float",
    "int",
    "len",
    "isinstance",
    "item",
)  # they only read


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source in program.sources:
        sums = [(call, tensor) for call in source.calls if (tensor := _summed(source, call)) is not None]
        for call, tensor in sums:
            name = source.code(tensor)
            first = _before(source, call, sums)
            if first is not None and _used_later(source, call, name):
                yield RULE.finding(
                    f"line {first.lineno} has already summed `{name}` over the ranks: this multiplies it by their number",
                    source.place(call),
                    "# remove this line, or name the tensor that is meant",
                    others=[source.place(first)],
                )
            total = _added_before(source, call, tensor)
            if total is not None:
                yield RULE.finding(
                    f"`{name}` has the sums of the passes before, which are summed over the ranks again in each pass",
                    source.place(call),
                    f"{source.code(call)}  # once, after the loop",
                    others=[source.place(total)],
                )


def _summed(source: SourceFile, call: ast.Call) -> ast.expr | None:
    """Return the tensor that a call replaces by its sum over the ranks, if a name or an attribute has it."""
    package, _, name = source.dotted(call.func).rpartition(".")
    if package != "torch.distributed" or name not in COLLECTIVES or not call.args:
        return None
    options = [*call.args[1:], *(k.value for k in call.keywords if k.arg == "op")]
    kinds = {ast.unparse(each).rpartition(".")[2] for each in options}
    tensor = call.args[0]
    while isinstance(tensor, ast.Attribute) and tensor.attr == "data":
        tensor = tensor.value
    if kinds & {"MAX", "MIN", "AVG", "PRODUCT", "BAND", "BOR", "BXOR"} or any(
        keyword.arg == "op" and not ast.unparse(keyword.value).endswith("SUM") for keyword in call.keywords
    ):
        return None
    return tensor if isinstance(tensor, (ast.Name, ast.Attribute)) else None


def _before(source: SourceFile, call: ast.Call, sums: list[tuple[ast.Call, ast.expr]]) -> ast.Call | None:
    """Return the same call earlier in the function, if the tensor has the same content in between."""
    around = source.function(call) or source.tree
    for other, tensor in reversed(sums):
        if position(other) >= position(call) or ast.dump(other) != ast.dump(call):
            continue
        if (source.function(other) or source.tree) is not around or not _both_run(source, other, call):
            continue
        between = [
            node
            for node in ast.walk(around)
            if position(other) < position(node) < position(call) and not _inside(source, node, other)
        ]
        if not any(_changes(source, node, tensor) for node in between):
            return other
    return None


def _both_run(source: SourceFile, first: ast.Call, second: ast.Call) -> bool:
    """Return whether the first call runs in each pass of a loop in which the second does."""
    loops = [
        [above for above in source.parents(each) if isinstance(above, (*LOOPS, ast.Try, ast.IfExp))]
        for each in (first, second)
    ]
    arms = {(id(node), arm) for node, arm in source.names.arms(second)}
    return loops[0] == loops[1] and all((id(node), arm) in arms for node, arm in source.names.arms(first))


def _inside(source: SourceFile, node: ast.AST, outer: ast.AST) -> bool:
    return any(above is outer for above in source.parents(node))


def _changes(source: SourceFile, node: ast.AST, tensor: ast.expr) -> bool:
    """Return whether a node may give the tensor another content. A method of ``self`` may change its attributes."""
    name = ast.unparse(tensor)
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target).split("[")[0] == name
    if _sets(node, name):
        return True
    if not isinstance(node, ast.Call) or source.dotted(node.func).startswith("torch.distributed."):
        return False
    called = getattr(node.func, "attr", getattr(node.func, "id", ""))
    given = [*node.args, *(keyword.value for keyword in node.keywords)]
    return called not in QUIET and (
        isinstance(tensor, ast.Attribute) or any(ast.unparse(each) == name for each in given)
    )


def _used_later(source: SourceFile, call: ast.Call, name: str) -> bool:
    """Return whether the result is used: a program that only measures or warms up the exchange does not."""
    around = source.function(call) or source.tree
    collectives = {
        id(each)
        for other in ast.walk(around)
        if isinstance(other, ast.Call) and source.dotted(other.func).startswith("torch.distributed.")
        for each in ast.walk(other)
    }
    return any(
        isinstance(node, (ast.Name, ast.Attribute))
        and id(node) not in collectives
        and position(node) > position(call)
        and ast.unparse(node) == name
        for node in ast.walk(around)
    )


def _added_before(source: SourceFile, call: ast.Call, tensor: ast.expr) -> ast.AST | None:
    """Return the statement of the same loop that adds to the tensor, if nothing in the loop sets or divides it."""
    name = ast.unparse(tensor)
    loop = None
    for above in source.parents(call):
        if isinstance(above, (*LOOPS, *FUNCTIONS, ast.Lambda)):
            loop = above if isinstance(above, LOOPS) else None
            break
    own = isinstance(loop, ast.For) and name in [ast.unparse(each) for each in flat([loop.target])]
    if loop is None or own:
        return None
    added = None
    for node in (each for statement in loop.body for each in ast.walk(statement)):
        if isinstance(node, ast.AugAssign) and ast.unparse(node.target) == name:
            if not isinstance(node.op, ast.Add):
                return None
            added = node
        elif _sets(node, name):
            return None
    return added


def _sets(node: ast.AST, name: str) -> bool:
    """Return whether a node gives the tensor another value: an assignment, or a method that works in place."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.For, ast.With, ast.NamedExpr, ast.Delete)):
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        return any(each is not None and ast.unparse(each).split("[")[0] == name for each in flat(targets))
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.endswith("_")
        and ast.unparse(node.func.value).split("[")[0] in (name, f"{name}.data")
    )


RULE = Rule("FL043", "reduced_twice", Severity.WRONG, __doc__, check)
