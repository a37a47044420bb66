"""The moving average of the weights takes several operations for each tensor.

What:
    A loop over all parameters computes `average * decay + (1 - decay) * weight` with several operations for each
    tensor: two products, a sum and a copy, or `mul_` and `add_`.
Why it matters:
    Each operation is a kernel of its own that reads and writes the whole tensor, and the products and the sum
    are new tensors. A model with 300 tensors takes 1,200 small kernels in every step, and the host must queue
    each of them.
How to fix it:
    `average.lerp_(weight, 1 - decay)` does it in one operation. `torch._foreach_lerp_` updates a whole list of
    tensors in a few kernels; `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)` uses it.
Example:
    import copy

    import torch

    model = torch.nn.Linear(4, 1)
    average = copy.deepcopy(model)
    with torch.no_grad():
        for kept, weight in zip(average.parameters(), model.parameters()):
  -         kept.copy_(0.999 * kept + 0.001 * weight)  # <-
  +         kept.lerp_(weight, 0.001)
Sources:
    https://docs.pytorch.org/docs/stable/optim.html#weight-averaging-swa-and-ema
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.value_paths import returns
from flatout.schema.findings import Finding, Severity

WEIGHTS = {"parameters", "named_parameters", "state_dict", "buffers", "named_buffers"}
WORDS = ("param", "state_dict", "weight")
SAME = {"data", "detach", "to", "clone", "float", "cpu", "cuda", "type_as"}  # x.data, x.detach().to(device)


def check(program: ScriptProgram) -> Iterator[Finding]:
    for source in program.sources:
        places = [node for node in source.nodes if _averages(program, source, node)]
        if places:
            first = source.place(places[0])
            yield RULE.finding(
                "the average takes several operations and new tensors for each tensor of the model",
                first,
                "average.lerp_(weight, 1 - decay)  # or torch._foreach_lerp_(averages, weights, 1 - decay) for all",
                others=[source.place(node) for node in places[1:]],
            )


def _averages(program: ScriptProgram, source: SourceFile, node: ast.AST) -> bool:
    """Return whether a statement mixes a tensor of a loop over weights with another one, into itself."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        kept: ast.expr | None = target if isinstance(target, (ast.Attribute, ast.Subscript)) else None
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        call = node.value
        if not isinstance(call.func, ast.Attribute) or not call.args:
            return False
        if call.func.attr == "add_" and _is_scaled(call.func.value):
            scaled = call.func.value.func.value  # type: ignore[attr-defined]
            weighs = _sums_to_one(call.func.value.args[0], _factor(call))  # type: ignore[attr-defined]
            return weighs and _of_weights(program, source, node, scaled)
        kept, value = (call.func.value if call.func.attr == "copy_" else None), call.args[0]
    else:
        return False
    return (
        kept is not None
        and value is not None
        and any(_mixes(each, name) for each, name in _values(program, source, value, kept))
        and _of_weights(program, source, node, kept)
    )


def _values(
    program: ScriptProgram, source: SourceFile, value: ast.expr, kept: ast.expr
) -> Iterator[tuple[ast.expr, str]]:
    """Yield the new value with the name of the old one: the expression, or what a called function returns."""
    yield value, _name(kept)
    if isinstance(value, ast.Call):
        at = next((n for n, each in enumerate(value.args) if _name(each) == _name(kept)), None)
        for _, function in program.functions_called(source, value) if at is not None else ():
            assert isinstance(function, (*FUNCTIONS, ast.Lambda))
            names = [each.arg for each in function.args.args if each.arg != "self"]
            if at is not None and at < len(names):
                yield from ((each, names[at]) for each in returns(function))


def _mixes(value: ast.expr, kept: str) -> bool:
    """Return whether this is ``kept * a + other * (1 - a)``, in any order."""
    if not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)):
        return False
    products = [each for each in (value.left, value.right) if isinstance(each, ast.BinOp)]
    if len(products) != 2 or not all(isinstance(each.op, ast.Mult) for each in products):
        return False
    sides = [(each.left, each.right) for each in products]
    for (one, two), (three, four) in (sides, sides[::-1]):
        for tensor, factor in ((one, two), (two, one)):
            if _name(tensor) == kept:
                return _sums_to_one(factor, three) or _sums_to_one(factor, four)
    return False


def _sums_to_one(one: ast.expr | None, other: ast.expr | None) -> bool:
    """Return whether two factors are ``a`` and ``1 - a``, or numbers with the sum 1."""
    if one is None or other is None:
        return False
    if isinstance(one, ast.Constant) and isinstance(other, ast.Constant):
        numbers = one.value, other.value
        return all(isinstance(each, (int, float)) for each in numbers) and abs(sum(numbers) - 1) < 1e-9  # type: ignore[arg-type]
    for first, second in ((one, other), (other, one)):
        if (
            isinstance(first, ast.BinOp)
            and isinstance(first.op, ast.Sub)
            and isinstance(first.left, ast.Constant)
            and first.left.value == 1
            and ast.dump(first.right) == ast.dump(second)
        ):
            return True
    return False


def _is_scaled(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "mul_" and len(node.args) == 1


def _factor(add: ast.Call) -> ast.expr | None:
    """Return the factor of ``add_(other, alpha=factor)``, ``add_(factor * other)`` or ``add_(factor, other)``."""
    alpha = next((k.value for k in add.keywords if k.arg == "alpha"), None)
    if alpha is not None or len(add.args) == 2:
        return alpha or add.args[0]
    given = add.args[0]
    if isinstance(given, ast.BinOp) and isinstance(given.op, ast.Mult):
        return given.left if isinstance(given.left, (ast.BinOp, ast.Constant)) else given.right
    return None


def _name(node: ast.expr) -> str:
    """Return the tensor's own name: ``p`` of ``p.data`` and of ``p.detach().to(device)``."""
    while True:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SAME:
            node = node.func.value
        elif isinstance(node, ast.Attribute) and node.attr in SAME:
            node = node.value
        else:
            return ast.unparse(node)


def _of_weights(program: ScriptProgram, source: SourceFile, node: ast.AST, kept: ast.expr) -> bool:
    """Return whether a loop over weights gives the tensor, here or where its function is called."""
    root = kept
    while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
        root = root.func if isinstance(root, ast.Call) else root.value
    name = root.id if isinstance(root, ast.Name) else ""
    loops = [each for each in source.parents(node) if isinstance(each, ast.For)]
    if any(_over_weights(source, loop) and _uses_loop(loop, kept) for loop in loops):
        return True
    function = source.function(node)
    if function is None or name not in [each.arg for each in function.args.args]:
        return False
    return any(
        _over_weights(home, loop)
        for home in program.sources
        for call in home.calls
        if (getattr(call.func, "attr", "") or getattr(call.func, "id", "")) == function.name
        for loop in home.parents(call)
        if isinstance(loop, ast.For) and any(_uses_loop(loop, each) for each in call.args)
    )


def _uses_loop(loop: ast.For, node: ast.expr) -> bool:
    names = {each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)}
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(node))


def _over_weights(source: SourceFile, loop: ast.For) -> bool:
    """Return whether a loop iterates over the tensors of a model: ``model.parameters()``, or names that say so."""
    texts = [ast.unparse(loop.iter)]
    for node in ast.walk(loop.iter):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in WEIGHTS:
            return True
        if isinstance(node, ast.Name):
            texts += [ast.unparse(b.value) for b in source.names.reaching(node) if b.value is not None]
    return any(word in text.lower() for text in texts for word in WORDS)


RULE = Rule("FL121", "average_in_small_operations", Severity.TIME, __doc__, check)
