"""Copy the next batches to the GPU while the model works on this one.

What it does: pins each batch and copies it on a stream of its own, as soon as it is made; with a depth of 1 or 2, batches are taken from the loader ahead of
    the script. The script receives the same host tensors as before, and when it moves one to the GPU it is handed the copy.
Why it is faster: the copy no longer stands between two steps. A copy from memory that is not pinned makes the host wait for all that is queued on the GPU.
When it does not help: small batches; loaders that are the wall themselves; data that is on the GPU already.
What it can change: nothing: a copy is handed out only while the host tensor still is what was copied. Batches are only taken ahead
    where loader workers draw for them, so that no random number of the program's own comes in another order.
Evidence: apex and DALI prefetch for this reason; measured on your program before it is kept.
Sources: torch documentation, "CUDA semantics" on streams and `record_stream`; NVIDIA apex, examples/imagenet, data_prefetcher.
"""

from __future__ import annotations

from typing import Any

from flatout.plan.facts import Facts
from flatout.plan.lever import Comparison, Lever, Options, Skip, Undo, Value
from flatout.plan.words import Effect, Moment

DEPTHS = (1, 2)  # batches that are taken ahead
IN_ORDER = 0


def applies(facts: Facts, scene: Any) -> Options | Skip:
    if scene.device_type != "cuda" and (scene.backwards or not facts.cuda):  # before the first step the device is not known
        return Skip("no parameter of the program is on a CUDA device")
    if not scene.backwards:
        return Options((*DEPTHS, IN_ORDER))
    live = scene.training_loaders
    if not scene.loaders:
        return Skip("no torch DataLoader was made in this process, so its batches come from elsewhere")
    if not live:
        return Skip("the training DataLoader no longer exists, so all of its batches were taken before")
    return Options((*DEPTHS, IN_ORDER) if any(loader.num_workers and not _has_own_order(loader) for loader in live) else (IN_ORDER,))


def _has_own_order(loader: Any) -> bool:
    from flatout.pipeline.streams import has_own_order

    return has_own_order(loader.sampler, loader.batch_sampler)


def apply(scene: Any, value: Value, ledger: Any) -> Undo:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"the value of device_prefetch is a number of batches, not {value!r}")
    from flatout.pipeline.device import Twins, hand_out
    from flatout.pipeline.feed import Feed

    twins = Twins()
    hand_out(twins, ledger)

    def copied(loader: Any, asked: dict[str, Any], feed: Any) -> Any:
        feed = feed or Feed(loader)
        feed.copies = (IN_ORDER if _has_own_order(loader) else int(value), twins)
        return feed

    scene.feed_loaders(copied, ledger)
    return ledger.restore


def known_bad(scene: Any, value: Value, ledger: Any) -> Undo:
    """Hands out the copy of the batch before."""
    from flatout.pipeline.feed import Feed

    class Late(Feed):
        before: Any = None

        def __getitems__(self, indices: Any) -> Any:
            batch = super().__getitems__(indices)
            self.before, batch = batch, self.before if self.before is not None else batch
            return batch

    scene.feed_loaders(lambda loader, asked, feed: feed or Late(loader), ledger)
    return ledger.restore


def code(value: Value) -> str:
    return ("with torch.cuda.stream(side):\n"
            "    following = images.pin_memory().to(\"cuda\", non_blocking=True)\n"
            "torch.cuda.current_stream().wait_stream(side)  # before the step that uses it, and following.record_stream(...)")


LEVER = Lever("device_prefetch", Moment.LOADER, Effect.EXACT, applies, code, apply=apply, guard=Comparison.BITWISE, known_bad=known_bad,
              after=("loader", "batched_transforms"), page=__doc__)
