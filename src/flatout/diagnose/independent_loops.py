"""Python loops whose passes do not depend on each other, so that one call on a whole tensor replaces them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.probe.names import COMPREHENSIONS, FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile

ALLOCATE = {"zeros", "ones", "empty", "full", "zeros_like", "empty_like", "new_zeros", "new_empty"}
# Words of modules that carry a state from one call to the next.
STATEFUL = ("cell", "lstm", "gru", "rnn", "lif", "neuron", "spik", "state", "memor", "cache", "step", "decod")
LOOPS = (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)


def slice_calls(
    program: ScriptProgram, source: SourceFile, function: ast.AST
) -> Iterator[tuple[ast.For, ast.Call, ast.expr]]:
    """Yield loop, call and input where a method runs a submodule on one slice of its input after another.

    The input of each call is known before the loop, and the results are collected in one tensor.
    """
    for loop in ast.walk(function):
        if not isinstance(loop, ast.For) or _in_chunks(loop):
            continue
        over = _names(loop.target)
        for statement in loop.body:
            if not isinstance(statement, (ast.Assign, ast.Expr)):
                continue
            for call in ast.walk(statement):
                if not isinstance(call, ast.Call) or not _submodule(program, source, call.func):
                    continue
                given = [*call.args, *(keyword.value for keyword in call.keywords)]
                sliced = [each for each in given if _slice(each, over)]
                if (
                    sliced
                    and next(each for each in source.parents(call) if isinstance(each, LOOPS)) is loop
                    and all(_known_before(loop, each, over) for each in given)
                    and _collected(program, source, loop, statement, call)
                ):
                    assert isinstance(sliced[0], ast.Subscript)
                    yield loop, call, sliced[0].value


def filled_entries(
    program: ScriptProgram, source: SourceFile, function: ast.AST
) -> Iterator[tuple[ast.For, ast.Assign, ast.expr]]:
    """Yield outer loop, assignment and tensor where nested loops compute one entry of a tensor at a time."""
    for statement in ast.walk(function):
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Subscript):
            continue
        base, indices = _indexed(statement.targets[0])
        loops = [
            each
            for each in source.parents(statement)
            if isinstance(each, ast.For) and source.function(each) is function
        ]
        used = [each for each in loops if _counts(each) and _counts(each) & indices]
        if (
            len(used) < 2
            or len(used) != len(loops)
            or not all(_over_a_tensor(each) for each in loops)
            or not isinstance(base, ast.Name)
            or not _allocated(program, source, base)
        ):
            continue
        reads = _values_read(loops[-1], statement.value)
        if _computes(source, reads) and not any(base.id in _names(each) for each in reads):
            yield loops[-1], statement, base


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _in_chunks(loop: ast.For) -> bool:
    """Return whether a loop limits memory on purpose, or may end early."""
    text = ast.unparse(loop.iter).lower()
    return (
        any(name in text for name in ("chunk", "split", "micro", "mini"))
        or any(isinstance(each, (ast.Break, ast.Return, ast.Yield)) for each in ast.walk(loop))
        or (isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 3)
    )


def _submodule(program: ScriptProgram, source: SourceFile, function: ast.expr, depth: int = 0) -> bool:
    """Return whether a call runs a layer that has no state: ``self.encoder(...)``."""
    if (
        not isinstance(function, ast.Attribute)
        or not isinstance(function.value, ast.Name)
        or function.value.id != "self"
        or any(word in function.attr.lower() for word in STATEFUL)
    ):
        return False
    klass = source.klass(function)
    if klass is None:
        return False
    own = next((m for m in klass.body if isinstance(m, FUNCTIONS) and m.name == function.attr), None)
    if own is not None:
        return (
            depth < 2
            and not _keeps_a_value(own)
            and any(
                isinstance(each, ast.Call) and _submodule(program, source, each.func, depth + 1)
                for each in ast.walk(own)
            )
        )
    for origin in program.origins(source, function):
        name = origin.node.func if isinstance(origin.node, ast.Call) else None
        shown = getattr(name, "attr", getattr(name, "id", ""))
        if not shown[:1].isupper() or any(word in shown.lower() for word in STATEFUL) or origin.part:
            return False
        for home, made in program.class_named(origin.source, name):  # type: ignore[arg-type]
            if any(_keeps_a_value(method) for _, method in program.methods(home, made, "forward")):
                return False
    return True


def _keeps_a_value(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) for node in ast.walk(function)
    )


def _slice(node: ast.expr, over: set[str]) -> bool:
    """Return whether this is ``x[t]`` or ``x[:, t]`` for the variable ``t`` of the loop."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, (ast.Name, ast.Attribute)):
        return False
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return any(isinstance(each, ast.Name) and each.id in over for each in parts)


def _known_before(loop: ast.For, node: ast.AST, over: set[str], depth: int = 0) -> bool:
    """Return whether a value of one pass depends on no other pass."""
    if depth > 4:
        return False
    changed = [
        (target, statement)
        for statement in ast.walk(loop)
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr))
        and statement is not loop
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    for read in ast.walk(node):
        if not isinstance(read, (ast.Name, ast.Attribute)) or (
            isinstance(read, ast.Name) and read.id in over
        ):
            continue
        shown = ast.unparse(read)
        for target, statement in changed:
            if not any(
                isinstance(each, (ast.Name, ast.Attribute)) and ast.unparse(each) == shown
                for each in ast.walk(target)
            ):
                continue
            if not (
                isinstance(statement, ast.Assign)
                and target is statement.targets[0]
                and isinstance(target, ast.Name)
                and statement in loop.body
                and (statement.lineno, statement.col_offset) < (read.lineno, read.col_offset)
                and _known_before(loop, statement.value, over, depth + 1)
            ):
                return False
    return True


def _collected(
    program: ScriptProgram,
    source: SourceFile,
    loop: ast.For,
    statement: ast.stmt,
    call: ast.Call,
) -> bool:
    """Return whether the results have one shape: they become the entries of one tensor."""
    results = {id(call)}
    names = _names(statement.targets[0]) if isinstance(statement, ast.Assign) else set()

    def shows(node: ast.AST) -> bool:
        return any(
            id(each) in results or (isinstance(each, ast.Name) and each.id in names)
            for each in ast.walk(node)
        )

    function = source.function(loop)
    for each in ast.walk(loop):
        if (
            isinstance(each, ast.Assign)
            and isinstance(each.targets[0], ast.Subscript)
            and shows(each.value)
            and isinstance(each.targets[0].value, ast.Name)
            and _allocated(program, source, each.targets[0].value)
        ):
            return True
        if (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Attribute)
            and each.func.attr == "append"
            and isinstance(each.func.value, ast.Name)
            and each.args
            and shows(each.args[0])
            and function is not None
            and _stacked(source, function, each.func.value.id)
        ):
            return True
    return False


def _stacked(source: SourceFile, function: ast.AST, name: str) -> bool:
    return any(
        isinstance(each, ast.Call)
        and source.dotted(each.func) in ("torch.stack", "torch.cat")
        and each.args
        and isinstance(each.args[0], ast.Name)
        and each.args[0].id == name
        for each in ast.walk(function)
    )


def _allocated(program: ScriptProgram, source: SourceFile, name: ast.Name) -> bool:
    """Return whether a name is a tensor that is allocated before it is filled."""
    origins = program.origins(source, name)
    return bool(origins) and all(
        isinstance(origin.node, ast.Call)
        and not origin.part
        and isinstance(origin.node.func, ast.Attribute)
        and origin.node.func.attr in ALLOCATE
        and (origin.dotted.startswith("torch.") or origin.node.func.attr.startswith("new_"))
        for origin in origins
    )


def _indexed(node: ast.expr) -> tuple[ast.expr, set[str]]:
    """Return the tensor and the names of the indices of ``x[i][j]`` or ``x[i, j]``."""
    found: set[str] = set()
    while isinstance(node, ast.Subscript):
        for each in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            found |= {each.id} if isinstance(each, ast.Name) else set()
        node = node.value
    return node, found


def _counts(loop: ast.For) -> set[str]:
    """Return the name that counts the passes: ``i`` of ``for i in range(n)`` or ``for i, x in enumerate(xs)``."""
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else loop.target
    return {first.id} if isinstance(first, ast.Name) else set()


def _over_a_tensor(loop: ast.For) -> bool:
    """Return whether a loop runs over a dimension of a tensor: ``enumerate(x)``, ``range(x.size(0))``."""
    call = loop.iter
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or len(call.args) != 1:
        return False
    given = call.args[0]
    if call.func.id == "enumerate":
        return isinstance(given, ast.Name)
    return call.func.id == "range"


def _values_read(loop: ast.For, value: ast.expr) -> list[ast.expr]:
    """Return a value and the values of this loop's names in it."""
    found = [value]
    for name in _names(value):
        found += [
            each.value
            for each in ast.walk(loop)
            if isinstance(each, ast.Assign)
            and name in {t.id for t in each.targets if isinstance(t, ast.Name)}
        ]
    return found


def _computes(source: SourceFile, values: list[ast.expr]) -> bool:
    """Return whether one of the values is computed by torch."""
    return any(
        isinstance(each, ast.Call) and source.dotted(each.func).startswith("torch.")
        for value in values
        for each in ast.walk(value)
    )
