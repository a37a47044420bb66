"""Reasons for which several levers do not apply to a program, and what they ask of its modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.schema.program import TrainingContext

if TYPE_CHECKING:
    from torch.nn import Module

NO_CUDA = "no parameter of the program is on a CUDA device"
NO_GPU = "no CUDA device was found on this machine"
NO_LOADER = "this process created no torch DataLoader, so its batches come from another source"
NO_ROOT = "no nn.Module with trainable parameters was called, as in `model(x)`"
COMPILER_OFF = "torch.compile is switched off in this process ({off})"
COMPILER_CHOOSES = "the script compiles the model or a part of it, and the compiler chooses what is kept"
COMPILED_ONCE = (
    "the script differentiates twice (create_graph=True), and compiled functions have no second derivative"
)
HOOK_TABLES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def script_hooks(context: TrainingContext, module: Module) -> list[Any]:
    """The hooks on this module, without those of the training context."""
    return [
        hook
        for table in HOOK_TABLES
        for hook in getattr(module, table).values()
        if getattr(hook, "__self__", None) is not context
    ]


def modules_of(context: TrainingContext) -> list[Any]:
    """Every module of the roots, once."""
    return list({id(module): module for root in context.roots for module in root.modules()}.values())


def why_model_is_split(context: TrainingContext) -> str:
    """Why no module can be changed as a whole: the script calls several; "" if it calls one or none."""
    if context.model_is_split:
        return f"the script calls {len(context.roots)} modules separately, and no module contains them all"
    return ""
