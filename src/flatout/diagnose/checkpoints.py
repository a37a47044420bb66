"""What a program saves in its checkpoints, and what it reads back from them."""

import ast
from collections.abc import Iterator

from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile

POSITION_KEYS = {"epoch", "start_epoch", "step", "global_step", "iteration", "iter", "epochs_run", "iter_num"}
LOAD_FUNCTIONS = ("torch.load", "joblib.load", "pickle.load")


def checkpoint_reads(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.expr, str]]:
    """Yield the reads of an entry of a loaded checkpoint with their keys: ``saved["epoch"]``, ``saved.get("epoch")``."""
    for source in program.sources:
        for node in source.nodes:
            entry = entry_of(node)
            if entry is not None and any(
                origin.dotted in LOAD_FUNCTIONS for origin in program.origins(source, entry[0])
            ):
                assert isinstance(node, ast.expr)
                yield source, node, entry[1]


def entry_of(node: ast.AST) -> tuple[ast.expr, str] | None:
    """The dict and the key that an expression reads, if the key is a text."""
    match node:
        case ast.Subscript(owner, ast.Constant(str(key)), ast.Load()) | ast.Call(
            ast.Attribute(owner, "get" | "pop"), [ast.Constant(str(key)), *_]
        ):
            return owner, key
    return None


def optimizer_entries(program: ScriptProgram) -> list[tuple[SourceFile, ast.Call]]:
    """The ``optimizer.state_dict()`` that become entries of a dict, if the program saves anything."""
    if not any(program.calls("torch.save")):
        return []
    return [
        (source, call)
        for source, call in program.method_calls("state_dict")
        if isinstance(call.func, ast.Attribute)
        and is_optimizer(program, source, call.func.value)
        and _is_dict_value(source, call)
    ]


def is_optimizer(program: ScriptProgram, source: SourceFile, node: ast.expr) -> bool:
    return program.values.seems(source, node, "Optimizer") or "optim" in ast.unparse(node).lower()


def _is_dict_value(source: SourceFile, call: ast.Call) -> bool:
    """Whether a call gives the value of a dict: in its text, as a keyword, or by ``saved["key"] =``."""
    value: ast.AST = call
    parent = source.parent(call)
    while isinstance(parent, ast.IfExp):
        value, parent = parent, source.parent(parent)
    if isinstance(parent, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in parent.targets)
    return (isinstance(parent, ast.Dict) and value in parent.values) or isinstance(parent, ast.keyword)
