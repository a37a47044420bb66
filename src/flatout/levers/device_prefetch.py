"""Copy the next batches to the GPU while the model works on the current one.

What it does: pins each batch and copies it on a separate stream as soon as it exists. With a depth of 1 or 2,
    it takes batches from the loader ahead of the script. The script receives the same host tensors as before.
    When it moves one to the GPU, it gets the copy.
Why it is faster: steps no longer wait for the copy. A copy from memory that is not pinned makes the host wait
    for all work queued on the GPU.
When it does not help: small batches; loaders that are the bottleneck; data that is already on the GPU.
What it can change: nothing: a copy is used only if the host tensor is unchanged since the copy. Batches are
    taken ahead only if loader workers draw their random numbers, so the order of the program's own draws does
    not change.
Evidence: apex and DALI prefetch for this reason.
Sources: torch documentation, "CUDA semantics" on streams and `record_stream`; NVIDIA apex, examples/imagenet,
    data_prefetcher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.levers.reasons import NO_CUDA, NO_LOADER
from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Number, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.schema.program import Ledger, TrainingContext

DEPTHS = (1, 2)  # batches taken ahead
NO_LOOKAHEAD = 0


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if context.device_type != "cuda" and (
        context.backwards or not facts.cuda
    ):  # the device is unknown before the first step
        return Skip(NO_CUDA)
    if not context.backwards:
        return Options((*DEPTHS, NO_LOOKAHEAD))
    loaders = context.training_loaders
    if not context.loaders:
        return Skip(NO_LOADER)
    if not loaders:
        return Skip("the training DataLoader no longer exists, so all its batches are already loaded")
    return Options(
        (*DEPTHS, NO_LOOKAHEAD)
        if any(loader.num_workers and not _has_own_order(loader) for loader in loaders)
        else (NO_LOOKAHEAD,)
    )


def _has_own_order(loader: DataLoader) -> bool:
    from flatout.data.streams import custom_sampler

    return bool(custom_sampler(loader.sampler, loader.batch_sampler))


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    assert isinstance(value, int)
    from flatout.data.device import DeviceCopies, return_device_copies
    from flatout.data.feed import Feed

    device_copies = DeviceCopies()
    return_device_copies(device_copies, ledger)

    def copying(loader: DataLoader, requested: dict[str, Any], feed: Feed | None) -> Any:
        feed = feed or Feed(loader)
        feed.prefetch = (NO_LOOKAHEAD if _has_own_order(loader) else value, device_copies)
        return feed

    context.feed_loaders(copying, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return (
        "with torch.cuda.stream(side):\n"
        '    following = images.pin_memory().to("cuda", non_blocking=True)\n'
        "torch.cuda.current_stream().wait_stream(side)  # before the step that uses it, and following.record_stream(...)"
    )


LEVER = Lever(
    "device_prefetch",
    Moment.LOADER,
    Effect.EXACT,
    applies,
    code,
    apply=apply,
    after=("loader", "batched_transforms"),
    accepts=(Number(0, 1000),),
    page=__doc__,
)
