"""Recompute activations in the backward pass instead of storing them.

What it does: blocks=1.0 stores only the input of each repeated block and runs the block again; blocks=0.5 does
    so for every second block.
Why it is faster: it is not; it saves memory. It can pay off if a model then fits, or a larger micro-batch.
When it does not help: parameters and optimizer state fill the memory; a model without repeated blocks.
What it can change: nothing, bit for bit: dropout draws the same numbers, running statistics update once.
    Blocks that change their input or keep state between calls stay as they are.
Evidence: saved bytes of a small GPT 0.54 and 0.08 of the plain program's with half of the blocks and with all
    (CPU, float32, torch 2.14.1); time is measured on your program before it is kept.
Sources: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; torch.utils.checkpoint documentation.
"""

from collections.abc import Callable
from typing import Any

from flatout.levers.reasons import COMPILER_CHOOSES, NO_ROOT, why_model_is_split
from flatout.levers.recomputed_blocks import RecomputedBlock, repeated, spread, why_not
from flatout.schema.accepted import Number, Table
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value
from flatout.schema.program import Ledger, TrainingContext

NO_BLOCKS = "the model has no two blocks of the same class with at least two layers each"
BLOCKS: tuple[Value, ...] = ({"blocks": 0.5}, {"blocks": 1.0})


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.compiled_by_script:
        return Skip(COMPILER_CHOOSES)
    if context.create_graph_seen:
        return Skip(
            "the script differentiates twice (create_graph=True), which recomputed activations do not support"
        )
    if why := why_model_is_split(context):
        return Skip(why)
    if not context.roots:
        return Skip(NO_ROOT)
    if any(isinstance(root, context.torch.jit.ScriptModule) for root in context.roots):
        return Skip(
            "the model or a part of it is compiled by torch.jit, which does not call the forward of its layers"
        )
    blocks, reason = _blocks(context)
    return Options(BLOCKS) if blocks else Skip(f"there is no block to recompute: {reason}")


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    assert isinstance(value, dict)
    blocks, reason = _blocks(context)
    if not blocks:
        raise LookupError(f"there is no block to recompute: {reason}")
    chosen = spread(blocks, value["blocks"])
    reasons: list[str] = []

    def report(why: str) -> None:
        reasons.append(why)
        if len(reasons) == len(chosen):
            context.report("recompute", f"no block of this program can be recomputed: {why}")

    for module in chosen:
        context.wrap_forward(module, _recomputing(RecomputedBlock(context.torch, module, report)), ledger)
    return ledger.restore


def _recomputing(block: RecomputedBlock) -> Any:
    def wrapper(forward: Callable[..., Any]) -> Any:
        return lambda *args, **kwargs: block.forward(forward, args, kwargs)

    return wrapper


def _blocks(context: TrainingContext) -> tuple[list[Any], str]:
    blocks = [block for root in context.roots for block in repeated(context.torch, context.unwrap_ddp(root))]
    reasons = [why_not(context.torch, block) for block in blocks]
    return [block for block, reason in zip(blocks, reasons, strict=True) if not reason], next(
        filter(None, reasons), NO_BLOCKS
    )


def code(value: Value) -> str:
    share = value["blocks"] if isinstance(value, dict) else 1
    comment = "" if share == 1 else f"  # {share:.0%} of the blocks".replace("%", " %")
    return f"x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False){comment}"


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
    accepts=(Table({"blocks": (Number(0.01, 1, integer=False),)}, ("blocks",)),),
    page=__doc__,
)
