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
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

from flatout.data.batch_comparison import difference
from flatout.data.deferred import access
from flatout.data.device import DeviceCopies, DevicePrefetcher, ResidentDevice
from flatout.data.inspection import inspection_copy
from flatout.data.keeping import CacheOptions
from flatout.data.observing import PipelineReader
from flatout.data.operation import NotBatchable
from flatout.data.pipeline_tracker import PROBED_SAMPLES, PipelineTracker, track_pipelines
from flatout.data.pipelines import INTERCEPTION, Pipelines
from flatout.data.samples import CHANGED, KeptSamples, can_gather, gather_batch, open_samples
from flatout.data.source import FeedSource, cannot_feed, cannot_keep, fetch_samples, spread
from flatout.data.store import Store, replay_sample
from flatout.data.streams import (
    WorkerStreams,
    own_generators,
    preserve_states,
    restore_states,
    same_states,
    states,
)


class Feed:
    """`prepare` runs in the script's process at each iteration over the loader. Workers may request batches.

    The feed follows pipelines while `INTERCEPTION` is enabled.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.dataset = loader.dataset
        self.batched = self.light = False  # light: transforms with much arithmetic run on single images
        self.cache: CacheOptions | None = None
        self.emulated_workers = 0  # batches are drawn as by this many loader workers
        self.resident: ResidentDevice | None = None  # the device that makes batches and keeps all samples
        self.prefetch: tuple[int, DeviceCopies] | None = (
            None  # number of batches taken ahead, and their device copies
        )
        self._targets: dict[int, torch.device] = {}  # tensor of a batch -> device that the script moves it to
        self.refusal = self._cannot_feed = cannot_feed(loader)
        self.why_no_cache = cannot_keep(loader)  # why samples are not (or no longer) kept
        self.tracker: PipelineTracker | None = None
        self.samples: KeptSamples | None = None
        self.listeners: dict[
            str, Callable[[str], None]
        ] = {}  # option (keep, batched) -> receives messages about it
        self._plain_collate = loader.collate_fn
        self._has_workers = loader.num_workers > 0
        self._has_init_fn = loader.worker_init_fn is not None
        self._reported: set[str] = set()
        self._checked_pid: int | None = None
        self._rngs: list[Any] = []  # random generators of the data set
        # in a spawned worker until its first batch: the pipelines that it should find, and the type of its ledger
        self._spawned: tuple[Any, Any] | None = None

    @property
    def useless(self) -> str:
        """Why none of the requested options takes effect, or an empty string."""
        return self.refusal or (self.why_no_cache if not self.batched else "")

    @property
    def store(self) -> Store | None:
        return self.samples.store if self.samples is not None else None

    @property
    def pipelines(self) -> Pipelines:
        return self.tracker.pipelines if self.tracker is not None else Pipelines()

    @property
    def heavy(self) -> bool:
        """Whether transforms with much arithmetic run on whole batches."""
        return any(
            operation.heavy for pipeline in self.pipelines.batched for operation in pipeline.call_operations
        )

    @property
    def tolerance(self) -> float:
        """The largest allowed difference from the plain batch; 0 means the same bits."""
        return max((pipeline.tolerance for pipeline in self.pipelines.batched), default=0.0)

    @property
    def _active_cache(self) -> CacheOptions | None:
        return self.cache if not self.why_no_cache else None

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned worker, which reads the pipelines again from its data set."""
        tracker = self.tracker
        spawned = None if tracker is None else (tracker.pipelines.signature(), INTERCEPTION.ledger_type)
        return {
            **vars(self),
            "listeners": {},
            "tracker": None,
            "_rngs": [],
            "prefetch": None,
            "_spawned": spawned,
        }

    # -- preparing

    def begin(self, iterator: _BaseDataLoaderIter) -> Any:
        """Start an epoch with a new iterator. Return what replaces the data set, or None."""
        source = self._source(iterator)
        if self.prefetch is not None:
            depth, device_copies = self.prefetch
            if not iterator._num_workers and not self.emulated_workers:
                depth = 0  # a batch taken ahead would change the order of draws
            iterator._next_data = DevicePrefetcher(iterator, depth, device_copies, self._targets)
        return source

    def _source(self, iterator: _BaseDataLoaderIter) -> Any:
        if not iterator._auto_collation or self._cannot_feed:
            self._report_refusal()
            return None
        self.prepare()
        return FeedSource(
            self.dataset,
            self.__getitems__,
            WorkerStreams(self.emulated_workers, iterator._base_seed, self.dataset)
            if self.emulated_workers
            else None,
        )

    def prepare(self) -> None:
        """Read the current pipelines of the data set."""
        if self.cache is not None and self.why_no_cache:
            self._report("keep", self.why_no_cache)
        if self.refusal:
            self._report_refusal()
        if self.refusal or not (self.batched or self._active_cache):
            self.tracker = None
            self._close_samples()
            return
        self._rngs = own_generators(self.dataset)
        with preserve_states(self._rngs):
            try:
                self._read()
            except NotBatchable as why:
                self._refuse(str(why))
            except Exception as error:
                self._refuse(f"its samples could not be inspected ({error_summary(error)})")

    # -- batches

    def collate(self, batch: Any) -> Any:
        """Collate for the loader: nothing is left to do."""
        return batch

    def try_out(self) -> str:
        """Make a small batch both ways. Return why they differ, or "". Random generators do not change."""
        if hasattr(self.dataset, "__len__"):
            with preserve_states(self._rngs):
                if not self.refusal and self._is_active:
                    self._checked_batch(spread(len(self.dataset), PROBED_SAMPLES))
        return self.refusal

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        self._begin_in_worker()
        if self.refusal or not self._is_active:
            return self._plain_batch(indices)
        if self.pipelines.changed:
            self._pause()
            return self._plain_batch(indices)
        if self._checked_pid != os.getpid():
            self._checked_pid = os.getpid()
            return self._checked_batch(indices)
        # If kept samples are only gathered, only the batch operations can draw.
        before = torch.get_rng_state() if self._can_gather else states(self._rngs)
        try:
            return self._make_batch(indices, self.dataset)
        except Exception as error:
            why = (
                str(error)
                if isinstance(error, NotBatchable)
                else f"a batch could not be made ({error_summary(error)})"
            )
        torch.set_rng_state(before) if isinstance(before, Tensor) else restore_states(before)
        self._refuse(why)
        return self._plain_batch(indices)  # if the data is at fault, the same error appears again

    @property
    def _is_active(self) -> bool:
        return self.samples is not None or (self.tracker is not None and self.tracker.may_follow)

    @property
    def _can_gather(self) -> bool:
        if self.samples is None or self._plain_collate is not default_collate:
            return False
        return self.samples.store.full and can_gather(self.pipelines, self.samples.store)

    def _plain_batch(self, indices: Sequence[Any]) -> Any:
        return self._plain_collate(fetch_samples(self.dataset, indices))

    def _checked_batch(self, indices: Sequence[Any]) -> Any:
        self._rngs = own_generators(self.dataset)
        if self.samples is not None:
            self.samples.rngs = self._rngs
            if (
                torch.utils.data.get_worker_info() is not None
                and self._has_init_fn
                and self.samples.has_changed
            ):
                self._stop_caching(
                    "samples are not kept: the script's worker_init_fn may change the data set"
                )
        start = states(self._rngs)
        batch = self._plain_batch(indices)
        end = states(self._rngs)
        if self.samples is not None:  # changes by the data set's own code
            self.samples.record()
        why = self._difference(batch, indices, start, end)
        if why and self.samples is not None and self.batched:
            restore_states(start)
            self._stop_caching(f"samples are not kept: {why}")
            with preserve_states(self._rngs):
                self.tracker = self._new_tracker()
            why = self._difference(batch, indices, start, end)
        restore_states(end)
        if why:
            self._refuse(why)
        elif self.samples is not None:
            self.samples.record()
        return batch

    def _difference(self, batch: object, indices: Sequence[Any], start: Any, end: Any) -> str:
        tracker, why = self.tracker, ""
        for draw_now in dict.fromkeys((tracker is not None and tracker.draw_now, True)):
            restore_states(start)
            try:
                if tracker is not None:
                    tracker.draw_now = draw_now
                # fetching has already changed the data set
                made = self._make_batch(indices, inspection_copy(self.dataset))
                access(made)
                why = difference(batch, made, self.tolerance)
                why = why or (
                    ""
                    if same_states(end, states(self._rngs))
                    else "random numbers would be drawn in a different order"
                )
            except Exception as error:
                why = f"its first batch could not be made ({error_summary(error)})"
            if not why or not self.pipelines.batched:
                break
        return why

    def _make_batch(self, indices: Sequence[Any], dataset: Dataset) -> Any:
        rows = None
        if self.samples is not None:
            try:
                rows = self.samples.rows(indices, dataset)
            except NotBatchable as why:
                self._stop_caching(str(why))
        samples, tracker = self.samples, self.tracker
        if rows is not None and samples is not None and self._can_gather:
            with self.resident.stream.open() if self.resident is not None else nullcontext():
                batch = gather_batch(self.pipelines, samples.store, rows, self.resident)
        elif tracker is None:
            return self._plain_collate(fetch_samples(dataset, indices))
        elif rows is not None and samples is not None:
            samples_kept = samples.store.samples(rows)
            batch = tracker.batch(
                lambda recorder: [replay_sample(sample, self.pipelines, recorder) for sample in samples_kept],
                self._plain_collate,
                len(indices),
            )
        else:
            batch = tracker.batch(
                lambda recorder: fetch_samples(dataset, indices), self._plain_collate, len(indices)
            )
        if samples is not None:
            samples.after_batch()
        return batch

    def _begin_in_worker(self) -> None:
        """In a spawned worker, read the pipelines again: they must equal those of the script's process."""
        if self._spawned is None:
            return
        (signature, ledger_type), self._spawned = self._spawned, None
        self._rngs = own_generators(self.dataset)
        if ledger_type is not None:
            INTERCEPTION.enable(ledger_type())
        with preserve_states(self._rngs):
            try:
                self.tracker = self._new_tracker()
            except Exception as error:
                self._refuse(f"its samples could not be inspected in a worker ({error_summary(error)})")
                return
        if self.samples is not None and not self.samples.adopt_pipelines(signature, self.tracker.pipelines):
            self._stop_caching("samples are not kept: a worker finds different transforms in the data set")

    # -- kept samples

    def _read(self) -> None:
        default = torch.get_default_device()
        if default.type != "cpu":
            raise NotBatchable(
                f"the default device is {default} (torch.set_default_device), and the data set may draw its random numbers there"
            )
        before = self.tracker
        if (
            self.samples is not None
            and self.samples.dataset_state is not None
            and self.samples.dataset_state.changed(thoroughly=True)
        ):
            self._stop_caching(CHANGED)
        elif self.pipelines.changed:
            self._close_samples()
        self.tracker = tracker = self._new_tracker()
        if self.batched and not tracker.pipelines.batched and tracker.why_none:
            self._report("batched", tracker.why_none)
            if self._active_cache is None:
                raise NotBatchable(tracker.why_none)
        if self._active_cache is None:
            return
        try:
            if self.samples is not None and (
                before is None or not before.pipelines.same_as(tracker.pipelines)
            ):
                self._close_samples()
            self._open_samples(self._active_cache, tracker)
        except NotBatchable as why:
            if not self.batched:
                raise
            self._stop_caching(f"samples are fetched each time: {why}")
            self._read()

    def _new_tracker(self) -> PipelineTracker:
        reading = PipelineReader(self.batched, self.light, self._active_cache is not None, self._rngs)
        return track_pipelines(self.dataset, self._plain_collate, reading, partial(self._report, "batched"))

    def _open_samples(self, cache: CacheOptions, tracker: PipelineTracker) -> None:
        if self.samples is None:
            self.samples = open_samples(
                self.dataset,
                cache,
                tracker.pipelines,
                self._has_workers,
                self._rngs,
                split_optional=not self.batched,
            )
        self.samples.pipelines = tracker.pipelines
        if cache.eager:
            self.samples.fill_all()
        self.samples.record()
        if self.resident is not None:
            if self._plain_collate is not default_collate:
                raise NotBatchable(
                    "the script has its own collate function, so its batches are not made on the device"
                )
            store = self.samples.store
            if store.rows < len(self.dataset) or not can_gather(tracker.pipelines, store):
                raise NotBatchable(
                    "not all of it can be on the device: some samples do not fit, or some transforms need single images"
                )
            if not self.resident.on_host:
                store.move_to(self.resident.stream)

    def _close_samples(self) -> None:
        if self.samples is not None:
            self.samples.close()
        self.samples = None

    def _stop_caching(self, why: str) -> None:
        self._close_samples()
        self.cache, self.why_no_cache = None, why
        self._report("keep", why)

    def _pause(self) -> None:
        self._close_samples()
        self.tracker = None
        for option in ("keep", "batched"):
            self._report(option, "the script changes its transforms while batches are made")

    def _refuse(self, why: str) -> None:
        self._close_samples()
        self.refusal, self.tracker = why, None
        self._report_refusal()

    def _report_refusal(self) -> None:
        for option, requested in (("keep", self.cache), ("batched", self.batched)):
            if requested:
                self._report(option, self.refusal)

    def _report(self, option: str, message: str) -> None:
        listener = self.listeners.get(option)  # a worker has none
        if listener is not None and message not in self._reported:
            self._reported.add(message)
            listener(message)


def error_summary(error: Exception) -> str:
    """The type and the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def try_feeds(
    loaders: Iterable[Any], configure: Callable[[Feed], None], ledger: Any
) -> tuple[list[Feed], str]:
    """A tested feed per DataLoader, with the options that ``configure`` sets, and why none works.

    ``ledger`` is a separate one: it is restored at the end.
    """
    INTERCEPTION.enable(ledger)
    try:
        feeds = [_tested_feed(loader, configure) for loader in loaders]
    finally:
        ledger.restore()
    if not feeds:
        return [], "the script prepares its batches itself, without a DataLoader"
    return feeds, feeds[0].useless if all(feed.useless for feed in feeds) else ""


def _tested_feed(loader: DataLoader, configure: Callable[[Feed], None]) -> Feed:
    feed = Feed(loader)
    configure(feed)
    feed.prepare()
    feed.try_out()
    return feed
