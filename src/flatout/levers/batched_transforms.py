"""Apply transforms to a whole batch at once instead of to one image after another.

What it does: follows torchvision's transforms wherever the data set's own code calls them: an object or
    closure around them, two views of an image, a loop over a list, a collate function. It runs them as tensor
    operations on the batch, with the random numbers that each image would have drawn. Other
    transforms (rotations, erasing, RandomApply, RandAugment, ...) stay per image. With "light", so do resizing
    and colour changes, whose arithmetic on large images is faster in Pillow.
Why it is faster: a transform of a small image spends far more time in Python and in copies than in
    arithmetic. A batch pays this cost once.
When it does not help: large images of different sizes, where decoding takes the time; code that reads each
    image before its batch exists; functional calls; IterableDatasets; albumentations and kornia, which draw random numbers in
    another way.
What it can change: nothing: every value, every random draw and the order of draws match the plain pipeline.
    The first batch of each loader is computed both ways and compared. One exception: a contrast change of float images may round differently in the last
    places. The search then treats the lever as rounding.
Evidence: 5 times the rate for batches of 128 small images, and 21 times together with cached_prefix
    (bench/results: data; 2 cores of an AMD EPYC, torch 2.14.1, 2026-11).
Sources: torchvision.transforms; ATen/core/DistributionsHelper.h on how torch draws random numbers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flatout.schema.enums import Effect, Moment
from flatout.schema.facts import Facts
from flatout.schema.lever import Lever, Options, Skip, Undo, Value

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.schema.program import Ledger, TrainingContext


def applies(facts: Facts, context: TrainingContext) -> Options | Skip:
    if not context.backwards:  # no loader has been iterated yet; the rule checks each one
        return Options(("all", "light"))
    from flatout.data.feed import Feed, try_feeds

    def batched(feed: Feed) -> None:
        feed.batched = True

    feeds, why = try_feeds(context.training_loaders, batched, type(context.ledger)())
    if why:
        return Skip(why)
    heavy, apart = any(feed.heavy for feed in feeds), any(feed.tolerance for feed in feeds)
    return Options(("all", "light") if heavy else ("all",), effect=Effect.ROUNDING if apart else Effect.EXACT)


def apply(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    from flatout.data.feed import Feed
    from flatout.data.pipelines import INTERCEPTION

    def batched(loader: DataLoader, requested: dict[str, Any], feed: Feed | None) -> Any:
        feed = feed or Feed(loader)
        feed.batched, feed.light = True, value == "light"
        feed.listeners["batched"] = lambda sentence: context.report("batched_transforms", sentence)
        return feed

    INTERCEPTION.enable(ledger)
    context.feed_loaders(batched, ledger)
    return ledger.restore


def code(value: Value) -> str:
    return (
        "# make batches of bytes in the loader, then, for the whole batch, with torchvision.transforms.v2:\n"
        "images = v2.functional.normalize(images.float() / 255, mean, std)"
    )


LEVER = Lever(
    "batched_transforms",
    Moment.LOADER,
    Effect.ROUNDING,
    applies,
    code,
    apply=apply,
    after=("cached_prefix",),
    accepts=("all", "light"),
    page=__doc__,
)
