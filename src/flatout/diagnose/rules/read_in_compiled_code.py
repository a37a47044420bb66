"""A compiled function reads a value from the device.

What:
    A function or a model under `torch.compile` calls `.item()`, `.tolist()` or `.numpy()` on a tensor.
Why it matters:
    The compiled graph ends there: the value is read in Python, which waits for the device, and a second graph
    starts after it. Nothing is fused across the break, and CUDA graphs cannot cover the whole function.
How to fix it:
    Return the tensor, and read it outside, every hundred steps. `fullgraph=True` turns each break into an error.
Example:
    import torch

    @torch.compile
    def accuracy(output, target):
  -     return (output.argmax(-1) == target).float().mean().item()  # <-
  +     return (output.argmax(-1) == target).float().mean()
Sources:
    https://docs.pytorch.org/docs/stable/torch.compiler_faq.html#graph-breaks
"""

import ast
from collections.abc import Iterator

from flatout.diagnose.rule import Rule
from flatout.probe.each_step import called
from flatout.probe.names import FUNCTIONS
from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile
from flatout.probe.step_loops import SWITCHES, mentions
from flatout.schema.findings import Finding, Severity

READS = ("item", "tolist", "numpy")
COMPILERS = ("torch.compile",)
WITHOUT = ("disable", "ignore", "skip", "allow_in_graph", "custom_op", "library")
MAX_FUNCTIONS = 300


def check(program: ScriptProgram) -> Iterator[Finding]:
    if program.mentions("capture_scalar_outputs"):
        return
    waiting = list(_compiled(program))
    seen: set[int] = set()
    while waiting and len(seen) < MAX_FUNCTIONS:
        source, function, top = waiting.pop(0)
        if id(function) in seen or _left_out(function):
            continue
        seen.add(id(function))
        statements: set[int] = set()  # one finding for each: the first read ends the graph
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or _rarely(source, node, function):
                continue
            waiting += [(home, each, top) for home, each in called(program, source, node)]
            statement = id(source.statement(node))
            if _reads(program, source, node) and statement not in statements:
                statements.add(statement)
                yield RULE.finding(
                    f"`{source.code(node)}` ends the graph of the compiled `{top}`, and waits for the device",
                    source.place(node),
                    f"{source.code(node.func.value)}  # return the tensor, and read it outside",  # type: ignore[attr-defined]
                )


def _compiled(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.AST, str]]:
    """Yield the functions under torch.compile, with the name to show: by decorator, or as the argument of a call."""
    for source in program.sources:
        for function in source.functions:
            for each in function.decorator_list:
                if source.dotted(each.func if isinstance(each, ast.Call) else each) in COMPILERS and _on(
                    each
                ):
                    yield source, function, function.name
    for source, call in program.calls(*COMPILERS):
        if not call.args or not _on(call):
            continue
        given = call.args[0]
        for home, defined in program.definitions(source, given):
            if isinstance(defined, FUNCTIONS):
                yield home, defined, defined.name
        if isinstance(given, ast.Attribute):
            for home, klass in program.values.classes_of(source, given.value):
                yield from (
                    (there, each, given.attr) for there, each in program.methods(home, klass, given.attr)
                )
        for home, klass in program.values.classes_of(source, given):
            yield from ((there, each, klass.name) for there, each in program.methods(home, klass, "forward"))


def _on(call: ast.expr) -> bool:
    """Return whether a call of torch.compile is known to compile: not ``disable=...`` or ``backend="eager"``."""
    return not isinstance(call, ast.Call) or not any(
        k.arg in ("disable", "backend", None) for k in call.keywords
    )


def _left_out(function: ast.AST) -> bool:
    """Return whether a function is kept out of the graph by a decorator."""
    return any(
        word in ast.unparse(each) for each in getattr(function, "decorator_list", []) for word in WITHOUT
    )


def _rarely(source: SourceFile, node: ast.AST, function: ast.AST) -> bool:
    """Return whether a node is in an arm for debugging, in an error, or in a function that is only defined here."""
    for each in source.parents(node):
        if each is function:
            return False
        if isinstance(each, (ast.Raise, ast.Assert, *FUNCTIONS)):
            return True
        if isinstance(each, (ast.If, ast.IfExp)) and mentions(each.test, (*SWITCHES, "compiling", "log")):
            return True
    return False


def _reads(program: ScriptProgram, source: SourceFile, call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute) or call.func.attr not in READS or call.args:
        return False
    owner = call.func.value
    return not source.dotted(call.func) and not any(
        origin.dotted.split(".")[0] in ("numpy", "math") for origin in program.origins(source, owner)
    )


RULE = Rule("FL123", "read_in_compiled_code", Severity.TIME, __doc__, check)
