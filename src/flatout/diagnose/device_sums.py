"""The edit of a sum that is read from the device in every step: it is kept there, and read where it is used.

``total += loss.item()`` becomes ``total += loss.detach().double()``, and ``total / n`` becomes
``float(total) / n``. A Python float has 64 bits, so both sums have the same ones.
"""

import ast
import copy

from flatout.diagnose.rewrites import apply_edits, replace, to_file_lines, wrap
from flatout.probe.names import Binding
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import ProgramEvent, StepLoop
from flatout.schema.findings import Edit

READ_METHODS = {"item", "cpu", "numpy", "tolist"}
NUMBER_TYPES = (int, float)


def device_sum(program: ScriptProgram, loop: StepLoop, event: ProgramEvent) -> list[Edit]:
    """The edits for a value that a step fetches; none if they could change a number that is shown."""
    source, call = event.source, event.node
    statement = source.statement(call)
    if (
        not isinstance(call, ast.Call)
        or not isinstance(statement, ast.AugAssign)
        or not isinstance(statement.target, ast.Name)
        or _fetching_call(program, source, statement) is not call
        or not any(node is statement for node in ast.walk(loop.loop.node))
        or source.function(statement) is not source.function(loop.loop.node)
        or _may_lack_float64(program)
    ):
        return []
    tensor = call.func.value if isinstance(call.func, ast.Attribute) else call.args[0]
    if not _is_loss(program, loop, source, tensor):
        return []  # a count, say: it would become a float
    uses = _uses(program, source, statement.target)
    reads = [use for use in uses or () if isinstance(use.ctx, ast.Load)]
    if uses is None or any(_in_every_step(source, loop, read) for read in reads):
        return []
    detach = "" if _is_detached(tensor) else ".detach()"
    replacement = f"{source.code(tensor)}{detach}.double()"
    edits = replace(source, call, replacement)
    for read in reads:
        parent = source.parent(read)
        if not (isinstance(parent, ast.Call) and source.code(parent.func) == "float"):
            edits += wrap(source, read, "float(", ")")
    return edits if _changes_only(source, call, replacement, reads, edits) else []


def _fetching_call(program: ScriptProgram, source: SourceFile, statement: ast.AugAssign) -> ast.Call | None:
    """The call that fetches the value which a statement adds: ``loss.item()``, or that times a number."""
    value = statement.value
    if not isinstance(statement.op, ast.Add):
        return None
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult):
        if _is_number(program, source, value.right):
            value = value.left
        elif _is_number(program, source, value.left):
            value = value.right
    match value:
        case ast.Call(ast.Attribute(tensor, "item"), [], []):
            pass
        case ast.Call(ast.Name("float") as name, [(ast.Name() | ast.Attribute()) as tensor], []):
            if source.names.lookup(name):
                return None
        case _:
            return None
    methods = {node.attr for node in ast.walk(tensor) if isinstance(node, ast.Attribute)}
    simple = isinstance(tensor, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return value if simple and not methods & READ_METHODS else None


def _is_loss(program: ScriptProgram, loop: StepLoop, source: SourceFile, tensor: ast.expr) -> bool:
    """Whether a tensor is the loss of a backward pass, or comes from a loss function: it has a float dtype."""
    while True:
        match tensor:
            case ast.Attribute(inner, "data"):
                tensor = inner
            case ast.Call(ast.Attribute(inner, "detach" | "mean" | "sum") as method):
                if source.dotted(method):
                    break
                tensor = inner
            case _:
                break
    for event in loop.of("backward"):
        loss = event.subject
        while isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div):
            loss = loss.left
        if loss is not None and program.values.same(source, tensor, event.source, loss):
            return True
    origins = program.origins(source, tensor)
    return bool(origins) and all(
        isinstance(origin.node, ast.Call)
        and not origin.part
        and (
            "Loss" in program.values.kinds(origin.source, origin.node.func)
            or (
                origin.dotted.startswith("torch.nn.functional.")
                and origin.dotted.endswith(("loss", "cross_entropy", "kl_div"))
            )
        )
        for origin in origins
    )


def _is_number(program: ScriptProgram, source: SourceFile, node: ast.expr) -> bool:
    """Whether an expression is a number of Python: a literal, a length, or a size of a tensor."""
    if isinstance(node, ast.Name):
        origins = program.origins(source, node)
        return bool(origins) and all(
            isinstance(origin.node, ast.expr)
            and not isinstance(origin.node, ast.Name)
            and not origin.part
            and _is_number(program, origin.source, origin.node)
            for origin in origins
        )
    match node:
        case ast.Constant(value):
            return type(value) in NUMBER_TYPES
        case ast.Subscript(ast.Attribute(attr="shape")) | ast.Call(ast.Attribute(attr="size"), [_]):
            return True
        case ast.Call(ast.Name("len") as name):
            return not source.names.lookup(name)
    return False


def _uses(program: ScriptProgram, source: SourceFile, total: ast.Name) -> list[ast.Name] | None:
    """Every use of a sum; None if it is not a local name that begins as a number and only adds such values."""
    scope, bindings = source.names.at[id(total)], source.names.lookup(total)
    if scope.names.get(total.id) is not bindings or (scope.parent is None and source is not program.main):
        return None
    if not all(_begins_or_adds(program, source, binding) for binding in bindings):
        return None
    uses = [
        node
        for node in source.nodes
        if isinstance(node, ast.Name) and node.id == total.id and source.names.lookup(node) is bindings
    ]
    same_scope = all(source.names.at[id(use)] is scope and not isinstance(use.ctx, ast.Del) for use in uses)
    return uses if same_scope else None


def _begins_or_adds(program: ScriptProgram, source: SourceFile, binding: Binding) -> bool:
    if binding.how == "augment" and isinstance(binding.node, ast.AugAssign):
        return _fetching_call(program, source, binding.node) is not None
    value = binding.value
    for index in binding.path:
        value = value.elts[index] if isinstance(value, ast.Tuple) and index < len(value.elts) else None
    return binding.how == "assign" and isinstance(value, ast.Constant) and type(value.value) in NUMBER_TYPES


def _in_every_step(source: SourceFile, loop: StepLoop, read: ast.Name) -> bool:
    """Whether a sum is read in the training loop, other than every so many steps."""
    inside = {id(node) for node in ast.walk(loop.loop.node)}
    if id(read) not in inside:
        return False
    return not any(
        arm == "body"
        and id(test) in inside
        and any(isinstance(node, ast.Mod) for node in ast.walk(test.test))
        for test, arm in source.names.arms(read)
    )


def _is_detached(tensor: ast.expr) -> bool:
    match tensor:
        case ast.Call(ast.Attribute(attr="detach")) | ast.Attribute(attr="data"):
            return True
    return False


def _may_lack_float64(program: ScriptProgram) -> bool:
    return program.mentions("mps", "xpu", "accelerator") or any(
        isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value[:3] in ("mps", "xpu")
        for _, node in program.nodes(ast.Constant)
    )


def _changes_only(
    source: SourceFile, call: ast.Call, replacement: str, reads: list[ast.Name], edits: list[Edit]
) -> bool:
    """Whether the edits change just these nodes: in a format string, the place of a name may be wrong."""
    if len({source.cell(node.lineno)[0] for node in [call, *reads]}) > 1:
        return False  # in other cells of a notebook
    text = apply_edits(source.text, to_file_lines(source, source.place(call).file, edits))
    if text is None:
        return False
    memo: dict[int, ast.AST] = {}
    tree = copy.deepcopy(source.tree, memo)
    wrapped = {id(memo[id(read)]) for read in reads}
    fetch = memo[id(call)]

    class Wrapped(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            if node is fetch:
                return ast.parse(replacement, mode="eval").body
            is_float = isinstance(node.func, ast.Name) and node.func.id == "float"
            if is_float and any(id(argument) in wrapped for argument in node.args):
                return node
            return self.generic_visit(node)

        def visit_Name(self, node: ast.Name) -> ast.AST:
            if id(node) not in wrapped:
                return node
            return ast.Call(ast.Name("float", ast.Load()), [node], [])

    return ast.dump(Wrapped().visit(tree)) == ast.dump(ast.parse(text))
