"""What a program saves in its checkpoints, and what it reads back from them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from flatout.probe.program import ScriptProgram
from flatout.probe.script import SourceFile

POSITIONS = {"epoch", "start_epoch", "step", "global_step", "iteration", "iter", "epochs_run", "iter_num"}
LOADS = ("torch.load", "joblib.load", "pickle.load")
READS = ("get", "pop")


def entries_read(program: ScriptProgram) -> Iterator[tuple[SourceFile, ast.expr, str]]:
    """Yield the reads of an entry of a loaded checkpoint with their keys: ``saved["epoch"]``, ``saved.get("epoch")``."""
    for source in program.sources:
        for node in source.nodes:
            entry = entry_of(node)
            if entry is not None and any(
                origin.dotted in LOADS for origin in program.origins(source, entry[0])
            ):
                assert isinstance(node, ast.expr)
                yield source, node, entry[1]


def entry_of(node: ast.AST) -> tuple[ast.expr, str] | None:
    """Return the dict and the key that an expression reads, if the key is a text."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        owner, key = node.value, node.slice
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in READS
        and node.args
    ):
        owner, key = node.func.value, node.args[0]
    else:
        return None
    return (owner, key.value) if isinstance(key, ast.Constant) and isinstance(key.value, str) else None


def optimizer_saves(program: ScriptProgram) -> list[tuple[SourceFile, ast.Call]]:
    """Return the ``optimizer.state_dict()`` that become entries of a dict, if the program saves anything."""
    if not any(program.calls("torch.save")):
        return []
    return [
        (source, call)
        for source, call in program.method_calls("state_dict")
        if isinstance(call.func, ast.Attribute)
        and about_optimizer(program, source, call.func.value)
        and _is_entry(source, call)
    ]


def about_optimizer(program: ScriptProgram, source: SourceFile, node: ast.expr) -> bool:
    return program.values.seems(source, node, "Optimizer") or "optim" in ast.unparse(node).lower()


def _is_entry(source: SourceFile, call: ast.Call) -> bool:
    """Return whether a call gives the value of a dict: in its text, as a keyword, or by ``saved["key"] =``."""
    inside: ast.AST = call
    above = source.parent(call)
    while isinstance(above, ast.IfExp):
        inside, above = above, source.parent(above)
    if isinstance(above, ast.Assign):
        return any(isinstance(target, ast.Subscript) for target in above.targets)
    return (isinstance(above, ast.Dict) and inside in above.values) or isinstance(above, ast.keyword)
