"""Python loops whose passes do not depend on each other, so that one call on a whole tensor replaces them."""

import ast
from collections.abc import Iterator

from flatout.probe.names import COMPREHENSIONS, FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile

FACTORIES = {"zeros", "ones", "empty", "full", "zeros_like", "empty_like", "new_zeros", "new_empty"}
# Words of modules that carry a state from one call to the next.
STATEFUL_WORDS = (
    "cell",
    "lstm",
    "gru",
    "rnn",
    "lif",
    "neuron",
    "spik",
    "state",
    "memor",
    "cache",
    "step",
    "decod",
)
LOOPS = (ast.For, ast.AsyncFor, ast.While, *COMPREHENSIONS)


def slice_calls(
    program: ScriptProgram, source: SourceFile, function: ast.AST
) -> Iterator[tuple[ast.For, ast.Call, ast.expr]]:
    """Yield loop, call and input where a method runs a submodule on one slice of its input after another.

    The input of each call is known before the loop, and the results are collected in one tensor."""
    for loop in ast.walk(function):
        if not isinstance(loop, ast.For) or _limits_memory(loop):
            continue
        loop_names = _names(loop.target)
        for statement in loop.body:
            if not isinstance(statement, (ast.Assign, ast.Expr)):
                continue
            for call in ast.walk(statement):
                if not isinstance(call, ast.Call) or not _is_stateless_submodule(program, source, call.func):
                    continue
                arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
                sliced = [argument for argument in arguments if _is_slice(argument, loop_names)]
                if (
                    sliced
                    and next(node for node in source.parents(call) if isinstance(node, LOOPS)) is loop
                    and all(_is_independent(loop, argument, loop_names) for argument in arguments)
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
            loop
            for loop in source.parents(statement)
            if isinstance(loop, ast.For) and source.function(loop) is function
        ]
        if (
            len(loops) < 2
            or not all(_counter(loop) & indices and _runs_over_tensor(loop) for loop in loops)
            or not isinstance(base, ast.Name)
            or not _is_allocated(program, source, base)
        ):
            continue
        computed = _values_computed(loops[-1], statement.value)
        if _uses_torch(source, computed) and not any(base.id in _names(value) for value in computed):
            yield loops[-1], statement, base


def _names(node: ast.AST) -> set[str]:
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}


def _limits_memory(loop: ast.For) -> bool:
    """Whether a loop limits memory on purpose, or may end early."""
    text = ast.unparse(loop.iter).lower()
    return (
        any(name in text for name in ("chunk", "split", "micro", "mini"))
        or any(isinstance(node, (ast.Break, ast.Return, ast.Yield)) for node in ast.walk(loop))
        or (isinstance(loop.iter, ast.Call) and len(loop.iter.args) == 3)
    )


def _is_stateless_submodule(
    program: ScriptProgram, source: SourceFile, function: ast.expr, depth: int = 0
) -> bool:
    """Whether a call runs a layer that has no state: ``self.encoder(...)``."""
    if (
        not isinstance(function, ast.Attribute)
        or not isinstance(function.value, ast.Name)
        or function.value.id != "self"
        or any(word in function.attr.lower() for word in STATEFUL_WORDS)
    ):
        return False
    klass = source.klass(function)
    if klass is None:
        return False
    method = next((m for m in klass.body if isinstance(m, FUNCTIONS) and m.name == function.attr), None)
    if method is not None:
        return (
            depth < 2
            and not _sets_attribute(method)
            and any(
                isinstance(node, ast.Call) and _is_stateless_submodule(program, source, node.func, depth + 1)
                for node in ast.walk(method)
            )
        )
    for origin in program.origins(source, function):
        name = origin.node.func if isinstance(origin.node, ast.Call) else None
        class_name = getattr(name, "attr", getattr(name, "id", ""))
        if (
            not class_name[:1].isupper()
            or any(word in class_name.lower() for word in STATEFUL_WORDS)
            or origin.part
        ):
            return False
        for home, definition in program.class_named(origin.source, name):  # type: ignore[arg-type]
            if any(_sets_attribute(forward) for _, forward in program.methods(home, definition, "forward")):
                return False
    return True


def _sets_attribute(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) for node in ast.walk(function)
    )


def _is_slice(node: ast.expr, loop_names: set[str]) -> bool:
    """Whether this is ``x[t]`` or ``x[:, t]`` for the variable ``t`` of the loop."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, (ast.Name, ast.Attribute)):
        return False
    return any(isinstance(part, ast.Name) and part.id in loop_names for part in _parts(node))


def _parts(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _is_independent(loop: ast.For, node: ast.AST, loop_names: set[str], depth: int = 0) -> bool:
    """Whether a value of one pass depends on no other pass."""
    if depth > 4:
        return False
    assigned = [
        (target, statement)
        for statement in ast.walk(loop)
        if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr))
        and statement is not loop
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
    ]
    for use in ast.walk(node):
        if not isinstance(use, (ast.Name, ast.Attribute)) or getattr(use, "id", "") in loop_names:
            continue
        code = ast.unparse(use)
        for target, statement in assigned:
            if not any(
                isinstance(part, (ast.Name, ast.Attribute)) and ast.unparse(part) == code
                for part in ast.walk(target)
            ):
                continue
            if not (
                isinstance(statement, ast.Assign)
                and target is statement.targets[0]
                and isinstance(target, ast.Name)
                and statement in loop.body
                and (statement.lineno, statement.col_offset) < (use.lineno, use.col_offset)
                and _is_independent(loop, statement.value, loop_names, depth + 1)
            ):
                return False
    return True


def _collected(
    program: ScriptProgram, source: SourceFile, loop: ast.For, statement: ast.stmt, call: ast.Call
) -> bool:
    """Whether the results have one shape: they become the entries of one tensor."""
    results = {id(call)}
    names = _names(statement.targets[0]) if isinstance(statement, ast.Assign) else set()

    def has_result(value: ast.AST) -> bool:
        return any(
            id(node) in results or (isinstance(node, ast.Name) and node.id in names)
            for node in ast.walk(value)
        )

    function = source.function(loop)
    for node in ast.walk(loop):
        match node:
            case ast.Assign(targets=[ast.Subscript(value=ast.Name() as tensor), *_], value=value):
                if has_result(value) and _is_allocated(program, source, tensor):
                    return True
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append"), args=[value, *_]) if (
                function is not None
            ):
                if has_result(value) and _is_stacked(source, function, name):
                    return True
    return False


def _is_stacked(source: SourceFile, function: ast.AST, name: str) -> bool:
    return any(
        isinstance(call, ast.Call)
        and source.dotted(call.func) in ("torch.stack", "torch.cat")
        and call.args
        and isinstance(call.args[0], ast.Name)
        and call.args[0].id == name
        for call in ast.walk(function)
    )


def _is_allocated(program: ScriptProgram, source: SourceFile, name: ast.Name) -> bool:
    """Whether a name is a tensor that is allocated before it is filled."""
    origins = program.origins(source, name)
    return bool(origins) and all(
        isinstance(origin.node, ast.Call)
        and not origin.part
        and isinstance(origin.node.func, ast.Attribute)
        and origin.node.func.attr in FACTORIES
        and (origin.dotted.startswith("torch.") or origin.node.func.attr.startswith("new_"))
        for origin in origins
    )


def _indexed(node: ast.expr) -> tuple[ast.expr, set[str]]:
    """The tensor and the names of the indices of ``x[i][j]`` or ``x[i, j]``."""
    indices: set[str] = set()
    while isinstance(node, ast.Subscript):
        indices |= {index.id for index in _parts(node) if isinstance(index, ast.Name)}
        node = node.value
    return node, indices


def _counter(loop: ast.For) -> set[str]:
    """The name that counts the passes: ``i`` of ``for i in range(n)`` or ``for i, x in enumerate(xs)``."""
    first = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else loop.target
    return {first.id} if isinstance(first, ast.Name) else set()


def _runs_over_tensor(loop: ast.For) -> bool:
    """Whether a loop may run over a dimension of a tensor: ``enumerate(x)``, ``range(x.size(0))``."""
    match loop.iter:
        case (
            ast.Call(func=ast.Name(id="enumerate"), args=[ast.Name()])
            | ast.Call(func=ast.Name(id="range"), args=[_])
        ):
            return True
    return False


def _values_computed(loop: ast.For, value: ast.expr) -> list[ast.expr]:
    """A value and the values of this loop's names in it."""
    names = _names(value)
    return [
        value,
        *(
            statement.value
            for statement in ast.walk(loop)
            if isinstance(statement, ast.Assign)
            and names & {target.id for target in statement.targets if isinstance(target, ast.Name)}
        ),
    ]


def _uses_torch(source: SourceFile, values: list[ast.expr]) -> bool:
    return any(
        isinstance(node, ast.Call) and source.dotted(node.func).startswith("torch.")
        for value in values
        for node in ast.walk(value)
    )
