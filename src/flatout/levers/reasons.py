"""Reasons for which several levers do not apply to a program."""

from __future__ import annotations

from flatout.schema.program import TrainingContext

NO_CUDA = "no parameter of the program is on a CUDA device"
NO_GPU = "no CUDA device was found on this machine"
NO_LOADER = "this process created no torch DataLoader, so its batches come from another source"
NO_ROOT = "no nn.Module with trainable parameters was called, as in `model(x)`"
COMPILER_OFF = "torch.compile is switched off in this process ({off})"
COMPILER_CHOOSES = "the script compiles the model or a part of it, and the compiler chooses what is kept"
COMPILED_ONCE = (
    "the script differentiates twice (create_graph=True), and compiled functions have no second derivative"
)


def why_model_is_split(context: TrainingContext) -> str:
    """Why no module can be changed as a whole: the script calls several; "" if it calls one or none."""
    if context.in_pieces:
        return f"the script calls {len(context.roots)} modules separately, and no module contains them all"
    return ""
