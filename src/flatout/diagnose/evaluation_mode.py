"""Models with unknown layers that are evaluated in training mode: a trainer calls ``train()``, but never ``eval()``."""

from __future__ import annotations

import ast

from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent

SETS_MODE = ("eval", "mode", "inference", "hook", "callback")  # parts of names of calls
STARTS = ("on_", "before_", "set_")
KNOWN_BLOCKS = ("torch.", "contextlib.nullcontext", "tqdm.", "warnings.")


def missing_mode(program: ScriptProgram, event: ProgramEvent) -> bool:
    """Return whether a call evaluates a model in the mode that the training loop has set, as far as visible.

    The layers are unknown, so the program must show that it thinks of modes: it calls ``train()`` on the model.
    """
    assert isinstance(event.node, ast.Call)
    model = event.node.func
    origins = program.origins(event.source, model)
    unknown = bool(origins) and all(
        isinstance(each.node, (ast.arg, ast.Attribute))
        or (
            isinstance(each.node, ast.Call)
            and not each.part
            and not each.dotted.startswith(("torch.", "transformers."))
            and not any(program.class_named(each.source, each.node.func))
        )
        for each in origins
    )
    between_epochs = any(
        loop.events[0].root is event.root and {loop.loop, *loop.outer} & set(event.loops)
        for loop in program.step_loops
    )
    return (
        unknown
        and between_epochs
        and "Loss" not in program.values.kinds(event.source, model)
        and any(_sets_training(program, each, event) for each in program.events)
        and not _may_switch(event)
    )


def _sets_training(program: ScriptProgram, mode: ProgramEvent, event: ProgramEvent) -> bool:
    """Return whether this is ``model.train()`` of the same model, in the same run."""
    assert isinstance(event.node, ast.Call)
    return (
        mode.kind == "train"
        and mode.subject is not None
        and mode.root is event.root
        and not getattr(mode.node, "args", None)
        and not getattr(mode.node, "keywords", None)
        and program.values.same(mode.source, mode.subject, event.source, event.node.func) is True
    )


def _may_switch(event: ProgramEvent) -> bool:
    """Return whether a context or a call on the way may set the mode: ``with evaluating(model):``."""
    for source, block in event.blocks:
        if not source.dotted(block.func if isinstance(block, ast.Call) else block).startswith(KNOWN_BLOCKS):
            return True
    for frame in event.frames:
        for node in ast.walk(frame):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                func = node.value.func
                name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
                if name.startswith(STARTS) or any(part in name.replace("model", "") for part in SETS_MODE):
                    return True
    return False
