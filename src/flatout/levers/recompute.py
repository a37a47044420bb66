"""Recompute activations in the backward pass instead of storing them.

What it does: ops="cheap" does not store tensors that follow from another saved tensor by one cheap operation
    (a normalisation, GELU, SiLU, a product); it recomputes them on demand. ops="linear" also recomputes
    outputs of linear layers that are wider than their input, a share of them or all. blocks=1.0 stores only
    the input of each repeated block and runs the block again; blocks=0.5 does so for every second block.
Why it is faster: it is not; it saves memory. It can pay off if a model then fits, or a larger micro-batch.
When it does not help: parameters and optimizer state fill the memory; networks of convolutions and ReLU have
    no cheap operations to recompute.
What it can change: nothing, bit for bit: dropout draws the same numbers, running statistics update once.
    Tensors whose first recomputation differs in a bit are stored. Blocks that change their input or keep
    state between calls stay as they are.
Evidence: saved bytes of a small GPT 0.63, 0.20 and 0.09 of the plain program's with ops="cheap", ops="linear"
    and all blocks (CPU, float32, torch 2.14.1); time is measured on your program before it is kept.
Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; Korthikanti et al., Reducing
    Activation Recomputation, 2022; torch.utils.checkpoint and torch.autograd.graph.saved_tensors_hooks
    documentation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import COMPILER_CHOOSES, NO_ROOT, in_pieces
from flatout.levers.saved_tensors.blocks import RecomputedBlock, repeated, spread, why_not
from flatout.levers.saved_tensors.rederive import SavedTensorRederiver
from flatout.schema.accepted import Number, Table
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from flatout.schema.program import Ledger, TrainingContext

OPERATIONS: tuple[Value, ...] = (
    {"ops": "cheap"},
    {"ops": "linear", "share": 0.34},
    {"ops": "linear", "share": 1.0},
)
NO_BLOCKS = "the model has no two blocks of the same class with at least two layers each"
SHARE = Number(0.01, 1, whole=False)
BLOCKS: tuple[Value, ...] = ({"blocks": 0.5}, {"blocks": 1.0})


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.compiled_by_script:
        return Skip(COMPILER_CHOOSES)
    if context.create_graph_seen:
        return Skip(
            "the script differentiates twice (create_graph=True), which recomputed activations do not support"
        )
    if why := in_pieces(context):
        return Skip(why)
    if not context.roots:
        return Skip(NO_ROOT)
    if any(isinstance(root, context.torch.jit.ScriptModule) for root in context.roots):
        return Skip(
            "the model or a part of it is compiled by torch.jit, which does not call the forward of its layers"
        )
    return Options((*OPERATIONS, *(BLOCKS if _blocks(context)[0] else ())))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    assert isinstance(value, dict)
    if "blocks" in value:
        _blocks_again(context, value["blocks"], ledger)
        return ledger.restore
    share = value.get("share", 1.0) if value["ops"] == "linear" else 0.0
    for root in context.roots:
        epsilons = {
            id(m.weight): float(m.eps)
            for m in root.modules()
            if getattr(m, "weight", None) is not None and isinstance(getattr(m, "eps", None), float)
        }
        context.wrap_forward(
            context.without_ranks(root),
            _through(SavedTensorRederiver(context.torch, share, epsilons)),
            ledger,
        )
    return ledger.restore


def _through(saving: SavedTensorRederiver | RecomputedBlock) -> Any:
    def wrapper(forward: Callable[..., Any]) -> Any:
        return lambda *args, **kwargs: saving.forward(forward, args, kwargs)

    return wrapper


def _blocks(context: TrainingContext) -> tuple[list[Any], str]:
    """The repeated blocks that may be computed twice, and why others may not."""
    blocks = [
        block for root in context.roots for block in repeated(context.torch, context.without_ranks(root))
    ]
    reasons = [why_not(context.torch, block) for block in blocks]
    return [block for block, reason in zip(blocks, reasons, strict=True) if not reason], next(
        filter(None, reasons), NO_BLOCKS
    )


def _blocks_again(context: TrainingContext, share: float, ledger: Ledger) -> None:
    found, reason = _blocks(context)
    if not found:
        raise LookupError(f"there is no block to recompute: {reason}")
    chosen = spread(found, share)
    refused: list[str] = []

    def refuse(why: str) -> None:
        refused.append(why)
        if len(refused) == len(chosen):
            context.report("recompute", f"no block of this program can be recomputed: {why}")

    for module in chosen:
        context.wrap_forward(module, _through(RecomputedBlock(context.torch, module, refuse)), ledger)


def code(value: Value) -> str:
    if isinstance(value, dict) and "blocks" in value:
        some = "" if value["blocks"] == 1 else f"  # {value['blocks']:.0%} of the blocks".replace("%", " %")
        return f"x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False){some}"
    kept = (
        "[torch.ops.aten.addmm.default, torch.ops.aten.mm.default]"
        if isinstance(value, dict) and value.get("ops") == "cheap"
        else "[]"
    )
    return (
        f"keep = functools.partial(torch.utils.checkpoint.create_selective_checkpoint_contexts, {kept})  # torch's closest equivalent\n"
        "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=keep)"
    )


LEVER = Lever(
    "recompute",
    Moment.MODEL,
    Effect.EXACT,
    applies,
    code,
    apply=apply,
    live=True,
    after=("autocast", "channels_last"),
    excludes=("compile",),
    saves_memory=True,
    accepts=(
        Table({"ops": ("cheap", "linear"), "share": (SHARE,)}, ("ops",)),
        Table({"blocks": (SHARE,)}, ("blocks",)),
    ),
    page=__doc__,
)
