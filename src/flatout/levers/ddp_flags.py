"""Change the arguments of the script's own DistributedDataParallel while it trains.

What it does: {gradient_as_bucket_view = true} makes gradients views of the buckets that are sent, so nothing
    is copied back. {broadcast_buffers = false} skips the broadcast of buffers before a forward pass if no
    rank has changed a buffer since the last broadcast; the ranks check this with each other. By name only:
    {static_graph = true} stops the search for unused parameters in scripts that set find_unused_parameters.
    Arguments that a value does not name keep the script's setting. flatout inspects four passes first. If
    they show that an argument is unsound, flatout leaves it out and reports it.
Why it is faster: each pass saves one copy of each gradient, and memory holds no second copy. Masks and
    positional encodings that are buffers are no longer sent in each step.
When it does not help: models whose gradients are small compared with their activations; batch normalisation,
    which changes its buffers in each pass; a few small buffers, for which the check costs as much as it
    saves.
What it can change: nothing, bit for bit. If the number of ranks is not a power of two, gradients that are
    accumulated, or zeroed by optimizer.zero_grad(set_to_none=False), round differently. A script must not
    keep `p.grad` across the next backward pass, which overwrites it. flatout detects this in the inspected
    passes and then changes nothing; it does not detect it later. static_graph rounds differently with more
    than two ranks. If the graph changes later, for example by stochastic depth or freezing, torch ends the
    program with an error.
Evidence: published: gradient_as_bucket_view 2 ms of a step of 28 ms (ACT, eight B200);
    measured on your program before it is kept.
Sources: torch documentation, "DistributedDataParallel"; torch/csrc/distributed/c10d/reducer.cpp;
    huggingface/lerobot, "training on 8x B200".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flatout.distributed.absent import why_left_alone
from flatout.schema.accepted import Table
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.nn import Module

    from flatout.schema.program import Ledger, TrainingContext

NAME = "ddp_flags"
VIEWS, BROADCAST, STATIC = "gradient_as_bucket_view", "broadcast_buffers", "static_graph"
KNOWN = {VIEWS: True, BROADCAST: False, STATIC: True}


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if why := _why_not(context):
        return Skip(why)
    ddps = context.ddp_modules
    flags: dict[str, Any] = {VIEWS: True} if not all(ddp.gradient_as_bucket_view for ddp in ddps) else {}
    if any(ddp.broadcast_buffers and ddp.modules_buffers for ddp in ddps) and not any(
        map(_changes, (m for ddp in ddps for m in ddp.modules()))
    ):
        flags[BROADCAST] = False
    if not flags:
        return Skip("the script already sets gradient_as_bucket_view, and no buffer broadcast can be skipped")
    ranks = {context.torch.distributed.get_world_size(ddp.process_group) for ddp in ddps}
    exact = VIEWS not in flags or all(size & (size - 1) == 0 for size in ranks)
    return Options(
        ({**flags}, *({name: value} for name, value in flags.items() if len(flags) > 1)),
        effect=Effect.EXACT if exact else Effect.ROUNDING,
    )


def _why_not(context: TrainingContext) -> str:
    return (
        why_left_alone(context.ddp_modules)
        if context.ddp_modules
        else "the program trains no torch.nn.parallel.DistributedDataParallel"
    )


def _changes(module: Module) -> bool:
    """Whether a training forward pass changes buffers of this module (running statistics)."""
    return (
        bool(getattr(module, "track_running_stats", False))
        and getattr(module, "running_mean", None) is not None
    )


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Raises LookupError without a DistributedDataParallel, or for static_graph without find_unused_parameters."""
    from flatout.distributed.script_ddp import change

    if why := _why_not(context):
        raise LookupError(why)
    assert isinstance(value, Mapping)
    if STATIC in value and not all(ddp.find_unused_parameters for ddp in context.ddp_modules):
        raise LookupError(
            f"{STATIC} removes the search for unused parameters, but the script does not set find_unused_parameters"
        )
    change(
        context,
        ledger,
        gradient_as_bucket_view=VIEWS in value,
        static_graph=STATIC in value,
        broadcast_when_changed=BROADCAST in value,
    )
    return ledger.restore


def code(value: Value) -> str:
    given = value if isinstance(value, Mapping) else {}
    return f"model = torch.nn.parallel.DistributedDataParallel(model{''.join(f', {name}={wanted}' for name, wanted in given.items())})"


LEVER = Lever(
    NAME,
    Moment.STEP,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    live=True,
    accepts=tuple(Table({flag: (on,) for flag, on in KNOWN.items()}, (name,)) for name in KNOWN),
    page=__doc__,
)
