"""Walk a program in the order of execution, entering its own functions where they are called.

The walk is linear: both arms of an ``if``, the body of a loop once.
"""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from flatout.probe.names import COMPREHENSIONS, FUNCTIONS, is_main_guard
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import LoopVisit, ProgramEvent

if TYPE_CHECKING:
    from flatout.probe.program import ScriptProgram

TRIES: tuple[type[ast.Try], ...] = (ast.Try, getattr(ast, "TryStar", ast.Try))  # `except*`, since Python 3.11
MAX_CALLS = 8  # maximum depth of entered functions
MAX_EVENTS = 60_000
CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_"}


class Walk:
    def __init__(self, program: ScriptProgram) -> None:
        self.program, self.values = program, program.values
        self.found: list[ProgramEvent] = []
        self.loops: tuple[LoopVisit, ...] = ()
        self.arms: tuple[tuple[ast.AST, str, SourceFile], ...] = ()
        self.blocks: tuple[tuple[SourceFile, ast.expr], ...] = ()
        self.frames: tuple[ast.AST, ...] = ()
        self.calls: tuple[tuple[SourceFile, ast.Call] | None, ...] = ()
        self.entered: set[int] = set()
        self.kinds: dict[
            int, tuple[str, ast.expr | None, bool]
        ] = {}  # of a call, the same wherever it is reached from
        self.orders: dict[int, list[ast.AST]] = {}
        self.root: ast.AST = program.main.tree

    def everything(self) -> list[ProgramEvent]:
        for source in self.program.sources:
            self.root = source.tree
            self._body(source, source.tree.body)
        # Functions without a visible call: passed to a launcher, a thread, a framework. Callers come before
        # callees.
        for uncalled in (True, False):
            for source in self.program.sources:
                for function in source.functions:
                    if id(function) not in self.entered and (
                        not self.program.callers(function) or not uncalled
                    ):
                        self.root = function
                        if runs_per_batch(self.program, source, function):
                            self.loops = (LoopVisit(source, function, 0, 1),)
                        self.blocks = self.program.calls_of.blocks(source, function)
                        self._enter(source, function)
                        self.loops, self.blocks = (), ()
        return self.found

    def _enter(
        self, source: SourceFile, function: ast.AST, call: tuple[SourceFile, ast.Call] | None = None
    ) -> None:
        if function in self.frames or len(self.frames) >= MAX_CALLS or len(self.found) > MAX_EVENTS:
            return
        self.entered.add(id(function))
        frames, calls, blocks = self.frames, self.calls, self.blocks
        self.frames, self.calls = (*frames, function), (*calls, call)
        self.blocks = (*blocks, *((source, each) for each in getattr(function, "decorator_list", [])))
        if isinstance(function, ast.Lambda):
            self._expression(source, function.body)
        else:
            self._body(source, function.body)  # type: ignore[attr-defined]
        self.frames, self.calls, self.blocks = frames, calls, blocks

    def _body(self, source: SourceFile, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(source, statement)

    def _arm(self, source: SourceFile, node: ast.AST, arm: str, statements: list[ast.stmt]) -> None:
        arms = self.arms
        self.arms = (*arms, (node, arm, source))
        self._body(source, statements)
        self.arms = arms

    def _in_loop(
        self, source: SourceFile, node: ast.AST, statements: list[ast.stmt], test: ast.expr | None = None
    ) -> None:
        loops = self.loops
        self.loops = (*loops, LoopVisit(source, node, len(self.arms), len(self.frames)))
        if test is not None:
            self._expression(source, test)
        self._body(source, statements)
        self.loops = loops

    def _statement(self, source: SourceFile, node: ast.stmt) -> None:
        if isinstance(node, (*FUNCTIONS, ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal)):
            return
        if isinstance(node, ast.ClassDef):
            self._body(source, [each for each in node.body if not isinstance(each, FUNCTIONS)])
        elif isinstance(node, (ast.For, ast.AsyncFor)):
            self._expression(source, node.iter)
            self._in_loop(source, node, node.body)
            self._body(source, node.orelse)
        elif isinstance(node, ast.While):
            self._in_loop(source, node, node.body, node.test)
            self._body(source, node.orelse)
        elif isinstance(node, ast.If) and is_main_guard(node):
            self._body(source, node.body)
        elif isinstance(node, ast.If):
            self._expression(source, node.test)
            self._arm(source, node, "body", node.body)
            self._arm(source, node, "orelse", node.orelse)
        elif isinstance(node, TRIES):
            self._body(source, node.body)
            for handler in node.handlers:
                self._arm(source, handler, "body", handler.body)
            self._body(source, [*node.orelse, *node.finalbody])
        elif isinstance(node, ast.Match):
            self._expression(source, node.subject)
            for case in node.cases:
                self._arm(source, case, "body", case.body)
        elif isinstance(node, (ast.With, ast.AsyncWith)):
            blocks = self.blocks
            for item in node.items:
                self._expression(source, item.context_expr)
                self.blocks = (*self.blocks, (source, item.context_expr))
            self._body(source, node.body)
            self.blocks = blocks
        else:
            for child in ast.iter_child_nodes(node):
                self._expression(source, child)
            for call in self.program.stores.of(source, node):
                methods = self.program.functions_called(source, call)
                for home, function in methods:
                    self._enter(home, function, (source, call))
                if methods:
                    self._add("call", source, call)
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
                self._add("zero_grad" if _forgets_gradient(node) else "assign", source, node)

    def _expression(self, source: SourceFile, node: ast.AST) -> None:
        for each in self._in_order(node):
            if not isinstance(each, ast.Call):
                loops = self.loops
                self.loops = (*loops, LoopVisit(source, each, len(self.arms), len(self.frames)))
                for child in sorted(
                    ast.iter_child_nodes(each), key=lambda child: not isinstance(child, ast.comprehension)
                ):
                    self._expression(source, child)
                self.loops = loops
                continue
            if id(each) not in self.kinds:
                self.kinds[id(each)] = self._kind(source, each)
            kind, subject, scaled = self.kinds[id(each)]
            if kind == "step":
                for argument in [*each.args[:1], *(k.value for k in each.keywords if k.arg == "closure")]:
                    for home, function in self.program.definitions(source, argument):
                        self._enter(home, function)
            elif kind == "call":
                for home, function in [
                    *self.program.functions_called(source, each),
                    *self.program.makers(source, each),
                ]:
                    self._enter(home, function, (source, each))
            self._add(kind, source, each, subject, scaled)

    def _in_order(self, node: ast.AST) -> list[ast.AST]:
        """Return the calls of an expression, arguments before their call.

        A comprehension counts as one node.
        """
        if id(node) not in self.orders:
            found: list[ast.AST] = []
            if isinstance(node, COMPREHENSIONS):
                found = [node]
            elif not isinstance(node, (ast.Lambda, ast.Name, ast.Constant, ast.expr_context, ast.operator)):
                for child in ast.iter_child_nodes(node):
                    found += self._in_order(child)
                if isinstance(node, ast.Call):
                    found.append(node)
            self.orders[id(node)] = found
        return self.orders[id(node)]

    def _add(
        self,
        kind: str,
        source: SourceFile,
        node: ast.AST,
        subject: ast.expr | None = None,
        scaled: bool = False,
    ) -> None:
        if len(self.found) <= MAX_EVENTS:
            self.found.append(
                ProgramEvent(
                    kind,
                    source,
                    node,
                    subject,
                    self.loops,
                    self.arms,
                    self.blocks,
                    self.frames,
                    self.root,
                    scaled,
                    self.calls,
                )
            )

    def _kind(self, source: SourceFile, call: ast.Call) -> tuple[str, ast.expr | None, bool]:
        function = call.func
        dotted = source.dotted(function)
        name = dotted.rpartition(".")[2] or (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        if name in CLIPS and not _without_limit(call):
            return "clip", call.args[0] if call.args else None, False
        if dotted == "torch.autograd.backward":
            return "backward", call.args[0] if call.args else None, False
        if dotted or not isinstance(function, ast.Attribute):
            return "call", None, False
        owner = function.value
        if name == "backward":
            return self._backward(source, call, owner)
        if name == "manual_backward":  # of Lightning, which scales the loss if the precision needs it
            return "backward", call.args[0] if call.args else None, True
        own_optimizer = name in ("step", "zero_grad") and self.values.is_a(source, owner, "Optimizer")
        if not own_optimizer and self.program.functions_called(source, call):
            return "call", None, False  # a method of the program itself is entered, whatever its name
        if name == "step":
            for kind, event in (
                ("GradScaler", "scaler_step"),
                ("Scheduler", "scheduler"),
                ("Profiler", "profiler_step"),
                ("Optimizer", "step"),
            ):
                if self.values.seems(source, owner, kind):
                    return event, call.args[0] if event == "scaler_step" and call.args else owner, False
        if (
            name == "zero_"
            and isinstance(owner, ast.Attribute)
            and "grad" in (owner.attr, getattr(owner.value, "attr", ""))
        ):
            return "zero_grad", None, False
        simple = {"zero_grad": "zero_grad", "set_epoch": "set_epoch", "train": "train", "eval": "eval"}
        if name == "unscale_":
            return "unscale", call.args[0] if call.args else None, False
        if name == "update" and self.values.seems(source, owner, "GradScaler"):
            return "scaler_update", owner, False
        if (
            name == "train"
            and call.args
            and isinstance(call.args[0], ast.Constant)
            and call.args[0].value is False
        ):
            return "eval", owner, False
        return (simple[name], owner, False) if name in simple else ("call", None, False)

    def _backward(
        self, source: SourceFile, call: ast.Call, owner: ast.expr
    ) -> tuple[str, ast.expr | None, bool]:
        if (
            isinstance(owner, ast.Call)
            and isinstance(owner.func, ast.Attribute)
            and owner.func.attr == "scale"
            and owner.args
        ):
            return "backward", owner.args[0], True
        handed = call.args[0] if call.args else None
        if (
            handed is not None
            and not isinstance(handed, (ast.Constant, ast.Tuple, ast.List))
            and not self.values.is_a(source, owner, "Tensor")
            and isinstance(owner, (ast.Name, ast.Attribute))
            and not call.keywords
        ):
            return "backward", handed, True  # accelerator.backward(loss), fabric.backward(loss): it may scale
        return "backward", owner, self._scaled(source, owner)

    def _scaled(self, source: SourceFile, loss: ast.expr, depth: int = 0) -> bool:
        """Return whether a loss may be the result of ``scaler.scale(loss)``, perhaps divided by a number."""
        for origin in self.values.origins(source, loss) if depth < 4 else ():
            node = origin.node
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr == "scale"
            ):
                return True
            if isinstance(node, ast.BinOp) and (
                self._scaled(origin.source, node.left, depth + 1)
                or self._scaled(origin.source, node.right, depth + 1)
            ):
                return True
        return False


def runs_per_batch(program: ScriptProgram, source: SourceFile, function: ast.AST) -> bool:
    """Return whether a framework calls this function for each batch, and it steps the optimizer itself.

    These are the ``training_step`` of a LightningModule with manual optimization, and the function of an Engine of
    Ignite.
    """
    klass = source.parent(function)
    if isinstance(klass, ast.ClassDef):
        return (
            getattr(function, "name", "") == "training_step"
            and any(base.endswith("LightningModule") for base in program.values.bases(source, klass))
            and _steps_itself(program, source, function)
        )
    return any(
        definition is function
        for home, call in program.calls("ignite.engine.Engine")
        for argument in call.args[:1]
        for _, definition in program.definitions(home, argument)
    )


def _steps_itself(program: ScriptProgram, source: SourceFile, function: ast.AST, depth: int = 0) -> bool:
    """Return whether a function, or one that it calls, has a backward pass and steps an optimizer."""
    own = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {node.func.attr for node in own if isinstance(node.func, ast.Attribute)}
    return bool({"manual_backward", "backward"} & names and "step" in names) or (
        depth < 3
        and any(
            _steps_itself(program, home, each, depth + 1)
            for node in own
            for home, each in program.functions_called(source, node)
        )
    )


def _without_limit(call: ast.Call) -> bool:
    """Return whether the limit is None. Copies of torch's function then only compute the norm."""
    limit = call.args[1] if len(call.args) > 1 else None
    return isinstance(limit, ast.Constant) and limit.value is None


def _forgets_gradient(node: ast.AST) -> bool:
    """Return whether this is ``p.grad = None``."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and node.value.value is None
        and any(isinstance(target, ast.Attribute) and target.attr == "grad" for target in node.targets)
    )
