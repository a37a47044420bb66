"""Makes the batches of one DataLoader, with kept samples and batched transforms.

A feed replaces the data set of torch's fetcher. `__getitems__` returns the finished batch, and collation has
nothing left to do. The batches are those of the loader itself: same values, same random draws, same types.
The first batch is made both ways and compared. If they differ, or anything else is unexpected, the loader
continues as before, and `refusal` says why.

    sample -> steps[:kept] -> store -> steps[kept:start], one by one -> operations, as a batch -> steps[end:], one by one -> collation
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.data import default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.data.batch_comparison import different
from flatout.data.device import DeviceCopies, DevicePrefetcher, ResidentDevice
from flatout.data.gathering import can_be_gathered, gathered
from flatout.data.inspection import inspection_copy
from flatout.data.intercept import INTERCEPTION
from flatout.data.keeping import CacheOptions
from flatout.data.kept import replayed
from flatout.data.observing import PipelineReader
from flatout.data.operation import NotBatchable
from flatout.data.pipeline_tracker import PROBED, PipelineTracker, learned
from flatout.data.pipelines import Pipelines
from flatout.data.samples import CHANGED, KeptSamples, opened
from flatout.data.source import FeedSource, cannot_feed, cannot_keep, fetched, spread
from flatout.data.store import Store
from flatout.data.streams import (
    WorkerStreams,
    own_generators,
    preserve_states,
    restore_states,
    same_states,
    states,
)

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Dataset


class Feed:
    """`prepare` runs in the script's process at each iteration over the loader. Workers may request batches.

    The feed follows pipelines while `INTERCEPTION` is held.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.dataset = loader.dataset
        self.batched = self.light = False  # light: transforms with much arithmetic run on single images
        self.keep: CacheOptions | None = None
        self.as_workers = 0  # batches are drawn as by this many loader workers
        self.resident: ResidentDevice | None = None  # the device that makes batches and keeps all samples
        self.copies: tuple[int, DeviceCopies] | None = (
            None  # number of batches taken ahead, and their device copies
        )
        self._goes_to: dict[int, torch.device] = {}  # tensor of a batch -> device that the script moves it to
        self.refusal = self._left_alone = cannot_feed(loader)
        self.keeps_nothing = cannot_keep(loader)  # why samples are not (or no longer) kept
        self.following: PipelineTracker | None = None
        self.samples: KeptSamples | None = None
        self.listeners: dict[
            str, Callable[[str], None]
        ] = {}  # option (keep, batched) -> receives messages about it
        self._plain_collate = loader.collate_fn
        self._workers = loader.num_workers > 0
        self._init = loader.worker_init_fn is not None
        self._said: set[str] = set()
        self._checked_by: int | None = None
        self._own: list[Any] = []  # random generators of the data set
        # in a spawned worker until its first batch: the pipelines that it should find, and the type of its ledger
        self._spawned: tuple[Any, Any] | None = None

    @property
    def useless(self) -> str:
        """Return why none of the requested options takes effect, or an empty string."""
        return self.refusal or (self.keeps_nothing if not self.batched else "")

    @property
    def store(self) -> Store | None:
        return self.samples.store if self.samples is not None else None

    @property
    def pipelines(self) -> Pipelines:
        return self.following.pipelines if self.following is not None else Pipelines()

    @property
    def heavy(self) -> bool:
        """Return whether transforms with much arithmetic run on whole batches."""
        return any(operation.heavy for pipeline in self.pipelines.batched for operation in pipeline.own)

    @property
    def apart(self) -> float:
        """Return the largest allowed difference from the plain batch; 0 means the same bits."""
        return max((pipeline.apart for pipeline in self.pipelines.batched), default=0.0)

    @property
    def _keeps(self) -> CacheOptions | None:
        return self.keep if not self.keeps_nothing else None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, which reads the pipelines again from its data set."""
        left: dict[str, Any] = {
            "listeners": {},
            "following": None,
            "_own": [],
            "copies": None,
        }
        following = self.following
        spawned = None if following is None else (following.pipelines.signature(), INTERCEPTION.ledger_type)
        return {**vars(self), **left, "_spawned": spawned}

    # -- preparing ------------------------------------------------------------------------------------------

    def begin(self, iterator: _BaseDataLoaderIter) -> Any:
        """Start an epoch with a new iterator. Return what replaces the data set, or None."""
        source = self._source(iterator)
        if self.copies is not None:
            depth, device_copies = self.copies
            if not iterator._num_workers and not self.as_workers:
                depth = 0  # a batch taken ahead would change the order of draws
            iterator._next_data = DevicePrefetcher(iterator, depth, device_copies, self._goes_to)
        return source

    def _source(self, iterator: _BaseDataLoaderIter) -> Any:
        if not iterator._auto_collation or self._left_alone:
            self._say_refusal()
            return None
        self.prepare()
        return FeedSource(
            self.dataset,
            self.__getitems__,
            WorkerStreams(self.as_workers, iterator._base_seed, self.dataset) if self.as_workers else None,
        )

    def prepare(self) -> None:
        """Read the current pipelines of the data set."""
        if self.keep is not None and self.keeps_nothing:
            self._say("keep", self.keeps_nothing)
        if self.refusal:
            self._say_refusal()
        if self.refusal or not (self.batched or self._keeps):
            self.following = None
            self._close_samples()
            return
        self._own = own_generators(self.dataset)
        with preserve_states(self._own):
            try:
                self._read()
            except NotBatchable as why:
                self._refuse(str(why))
            except Exception as error:
                self._refuse(f"its samples could not be inspected ({named(error)})")

    # -- batches --------------------------------------------------------------------------------------------

    def collate(self, batch: Any) -> Any:
        """Collate for the loader: nothing is left to do."""
        return batch

    def try_out(self) -> str:
        """Make a small batch both ways. Return why they differ, or "". Random generators do not change."""
        if hasattr(self.dataset, "__len__"):
            with preserve_states(self._own):
                if not self.refusal and self._is_fed:
                    self._first(spread(len(self.dataset), PROBED))
        return self.refusal

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """Return the finished batch of these samples."""
        self._begin_in_worker()
        if self.refusal or not self._is_fed:
            return self._plain(indices)
        if self.pipelines.changed:
            self._pause("the script changes its transforms while batches are made")
            return self._plain(indices)
        if self._checked_by != os.getpid():
            self._checked_by = os.getpid()
            return self._first(indices)
        # If kept samples are only gathered, only the batch operations can draw.
        before = torch.get_rng_state() if self._gathers else states(self._own)
        try:
            return self._made(indices, self.dataset)
        except Exception as error:
            why = (
                str(error)
                if isinstance(error, NotBatchable)
                else f"a batch could not be made ({named(error)})"
            )
        torch.set_rng_state(before) if isinstance(before, Tensor) else restore_states(before)
        self._refuse(why)
        return self._plain(indices)  # if the data is at fault, the same error appears again

    @property
    def _is_fed(self) -> bool:
        return self.samples is not None or (self.following is not None and self.following.may_follow)

    @property
    def _gathers(self) -> bool:
        """Return whether all samples are kept, need no single-image step, and use default collation."""
        if self.samples is None or self._plain_collate is not default_collate:
            return False
        return self.samples.store.full and can_be_gathered(self.pipelines, self.samples.store)

    def _plain(self, indices: Sequence[Any]) -> Any:
        return self._plain_collate(fetched(self.dataset, indices))

    def _first(self, indices: Sequence[Any]) -> Any:
        """Return the plain batch, and check that flatout's batch and final random states are the same."""
        self._own = own_generators(self.dataset)
        if self.samples is not None:
            self.samples.own = self._own
            if torch.utils.data.get_worker_info() is not None and self._init and self.samples.has_changed:
                self._keep_nothing(
                    "samples are not kept: the script's worker_init_fn may change the data set"
                )
        start = states(self._own)
        batch = self._plain(indices)
        end = states(self._own)
        if self.samples is not None:  # changes by the data set's own code
            self.samples.remember()
        why = self._different(batch, indices, start, end)
        if why and self.samples is not None and self.batched:
            restore_states(start)
            self._keep_nothing(f"samples are not kept: {why}")
            with preserve_states(self._own):
                self.following = self._learned()
            why = self._different(batch, indices, start, end)
        restore_states(end)
        if why:
            self._refuse(why)
        elif self.samples is not None:
            self.samples.remember()
        return batch

    def _different(self, batch: object, indices: Sequence[Any], start: Any, end: Any) -> str:
        """Return how the new batch differs from the plain one. ``start`` and ``end`` are generator states."""
        following, why = self.following, ""
        for at_once in dict.fromkeys((following is not None and following.at_once, True)):
            restore_states(start)
            try:
                if following is not None:
                    following.at_once = at_once
                why = different(
                    batch, self._made(indices, inspection_copy(self.dataset)), self.apart
                )  # fetching has already changed the data set
                why = why or (
                    ""
                    if same_states(end, states(self._own))
                    else "random numbers would be drawn in a different order"
                )
            except Exception as error:
                why = f"its first batch could not be made ({named(error)})"
            if not why or not self.pipelines.batched:
                break
        return why

    def _made(self, indices: Sequence[Any], dataset: Dataset) -> Any:
        rows = None
        if self.samples is not None:
            try:
                rows = self.samples.rows(indices, dataset)
            except NotBatchable as why:
                self._keep_nothing(str(why))
        samples, following = self.samples, self.following
        if rows is not None and samples is not None and self._gathers:
            make = partial(gathered, self.pipelines, samples.store, rows)
            batch = self.resident.made(make) if self.resident is not None else make()
        elif following is None:
            return self._plain_collate(fetched(dataset, indices))
        elif rows is not None and samples is not None:
            held = samples.store.samples(rows)
            batch = following.batch(
                lambda recorder: [replayed(sample, self.pipelines, recorder) for sample in held],
                self._plain_collate,
                len(indices),
            )
        else:
            batch = following.batch(
                lambda recorder: fetched(dataset, indices), self._plain_collate, len(indices)
            )
        if samples is not None:
            samples.after_batch()
        return batch

    def _begin_in_worker(self) -> None:
        """In a spawned worker, read the pipelines again: they must equal those of the script's process."""
        if self._spawned is None:
            return
        (signature, ledger_type), self._spawned = self._spawned, None
        self._own = own_generators(self.dataset)
        if ledger_type is not None:
            INTERCEPTION.hold(ledger_type())
        with preserve_states(self._own):
            try:
                self.following = self._learned()
            except Exception as error:
                self._refuse(f"its samples could not be inspected in a worker ({named(error)})")
                return
        if self.samples is not None and not self.samples.pipelines_are(signature, self.following.pipelines):
            self._keep_nothing("samples are not kept: a worker finds different transforms in the data set")

    # -- kept samples ----------------------------------------------------------------------------------------

    def _read(self) -> None:
        default = torch.get_default_device()
        if default.type != "cpu":
            raise NotBatchable(
                f"the default device is {default} (torch.set_default_device), and the data set may draw its random numbers there"
            )
        before = self.following
        if (
            self.samples is not None
            and self.samples.contents is not None
            and self.samples.contents.changed(thoroughly=True)
        ):
            self._keep_nothing(CHANGED)
        elif self.pipelines.changed:
            self._close_samples()
        self.following = following = self._learned()
        if self.batched and not following.pipelines.batched and following.why_none:
            self._say("batched", following.why_none)
            if self._keeps is None:
                raise NotBatchable(following.why_none)
        if self._keeps is None:
            return
        try:
            if self.samples is not None and (
                before is None or not before.pipelines.same_as(following.pipelines)
            ):
                self._close_samples()
            self._open_samples(self._keeps, following)
        except NotBatchable as why:
            if not self.batched:
                raise
            self._keep_nothing(f"samples are fetched each time: {why}")
            self._read()

    def _learned(self) -> PipelineTracker:
        reading = PipelineReader(self.batched, self.light, self._keeps is not None, self._own)
        return learned(self.dataset, self._plain_collate, reading, partial(self._say, "batched"))

    def _open_samples(self, keep: CacheOptions, following: PipelineTracker) -> None:
        if self.samples is None:
            self.samples = opened(
                self.dataset, keep, following.pipelines, self._workers, self._own, raw=not self.batched
            )
        self.samples.pipelines = following.pipelines
        if keep.ahead:
            self.samples.fill_all()
        self.samples.remember()
        if self.resident is not None:
            if self._plain_collate is not default_collate:
                raise NotBatchable(
                    "the script has its own collate function, so its batches are not made on the device"
                )
            store = self.samples.store
            if store.rows < len(self.dataset) or not can_be_gathered(following.pipelines, store):
                raise NotBatchable(
                    "not all of it can be on the device: some samples do not fit, or some transforms need single images"
                )
            if not self.resident.beside:
                store.move_to(self.resident.device)

    def _close_samples(self) -> None:
        if self.samples is not None:
            self.samples.close()
        self.samples = None

    def _keep_nothing(self, why: str) -> None:
        self._close_samples()
        self.keep, self.keeps_nothing = None, why
        self._say("keep", why)

    def _pause(self, why: str) -> None:
        """Stop until the next epoch."""
        self._close_samples()
        self.following = None
        self._say("keep", why)
        self._say("batched", why)

    def _refuse(self, why: str) -> None:
        self._close_samples()
        self.refusal, self.following = why, None
        self._say_refusal()

    def _say_refusal(self) -> None:
        for request, wished in (("keep", self.keep), ("batched", self.batched)):
            if wished:
                self._say(request, self.refusal)

    def _say(self, request: str, sentence: str) -> None:
        listener = self.listeners.get(request)  # a worker has none
        if listener is not None and sentence not in self._said:
            self._said.add(sentence)
            listener(sentence)


def named(error: Exception) -> str:
    """Return the type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def try_feeds(loaders: Iterable[Any], request: Callable[[Feed], None], ledger: Any) -> tuple[list[Feed], str]:
    """Return a tested feed per DataLoader, with the options that ``request`` sets, and why none works.

    ``ledger`` is a separate one: it is restored at the end.
    """
    INTERCEPTION.hold(ledger)
    try:
        feeds = [_tried(loader, request) for loader in loaders]
    finally:
        ledger.restore()
    if not feeds:
        return [], "the script prepares its batches itself, without a DataLoader"
    return feeds, feeds[0].useless if all(feed.useless for feed in feeds) else ""


def _tried(loader: DataLoader, request: Callable[[Feed], None]) -> Feed:
    feed = Feed(loader)
    request(feed)
    feed.prepare()
    feed.try_out()
    return feed
