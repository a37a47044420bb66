"""Models with unknown layers that are evaluated in training mode: a trainer calls ``train()``, but never ``eval()``."""

import ast

from flatout.probe.program import ScriptProgram
from flatout.probe.step_loops import ProgramEvent

MODE_WORDS = ("eval", "mode", "inference", "hook", "callback")  # parts of names of calls
HOOK_PREFIXES = ("on_", "before_", "set_")
NEUTRAL_CONTEXTS = ("torch.", "contextlib.nullcontext", "tqdm.", "warnings.")


def evaluates_in_training_mode(program: ScriptProgram, event: ProgramEvent) -> bool:
    """Whether a call evaluates a model in the mode that the training loop has set, as far as visible.

    The layers are unknown, so the program must show that it thinks of modes: it calls ``train()`` on the model."""
    assert isinstance(event.node, ast.Call)
    model = event.node.func
    origins = program.origins(event.source, model)
    unknown = bool(origins) and all(
        isinstance(origin.node, (ast.arg, ast.Attribute))
        or (
            isinstance(origin.node, ast.Call)
            and not origin.part
            and not origin.dotted.startswith(("torch.", "transformers."))
            and not any(program.class_named(origin.source, origin.node.func))
        )
        for origin in origins
    )
    between_epochs = any(
        loop.events[0].root is event.root and {loop.loop, *loop.outer} & set(event.loops)
        for loop in program.step_loops
    )
    return (
        unknown
        and between_epochs
        and "Loss" not in program.values.kinds(event.source, model)
        and any(_is_plain_train(program, call, event) for call in program.events)
        and not _may_set_mode(event)
    )


def _is_plain_train(program: ScriptProgram, call: ProgramEvent, event: ProgramEvent) -> bool:
    """Whether this is ``model.train()`` of the same model, in the same run."""
    assert isinstance(event.node, ast.Call)
    return (
        call.kind == "train"
        and call.subject is not None
        and call.root is event.root
        and not getattr(call.node, "args", None)
        and not getattr(call.node, "keywords", None)
        and program.values.same(call.source, call.subject, event.source, event.node.func) is True
    )


def _may_set_mode(event: ProgramEvent) -> bool:
    """Whether a context or a call on the way may set the mode: ``with evaluating(model):``."""
    for source, block in event.blocks:
        if not source.dotted(block.func if isinstance(block, ast.Call) else block).startswith(
            NEUTRAL_CONTEXTS
        ):
            return True
    for frame in event.frames:
        for node in ast.walk(frame):
            match node:
                case ast.Expr(ast.Call(ast.Attribute(attr=name) | ast.Name(name))):
                    if name.startswith(HOOK_PREFIXES) or any(
                        word in name.replace("model", "") for word in MODE_WORDS
                    ):
                        return True
    return False
