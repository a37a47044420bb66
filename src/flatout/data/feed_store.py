"""The samples that a feed keeps between epochs, and what it says to the user."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import default_collate

from flatout.data.device import DeviceCopies, ResidentDevice
from flatout.data.gathering import can_be_gathered
from flatout.data.keeping import CacheOptions
from flatout.data.observing import PipelineReader
from flatout.data.operation import NotBatchable
from flatout.data.pipeline_tracker import PipelineTracker, learned
from flatout.data.pipelines import Pipelines
from flatout.data.samples import CHANGED, KeptSamples, opened
from flatout.data.source import cannot_feed, cannot_keep
from flatout.data.store import Store

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class FeedStore:
    """The kept samples of one loader: opened, learned from, and given up with a sentence to the user."""

    def __init__(self, loader: DataLoader) -> None:
        self.dataset = loader.dataset
        self.batched = False
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
    def _keeps(self) -> CacheOptions | None:
        return self.keep if not self.keeps_nothing else None

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
        reading = PipelineReader(self.batched, self._keeps is not None, self._own)
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
