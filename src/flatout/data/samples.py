"""The kept samples of one data set, filled on demand and monitored for changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flatout.data.changes import DatasetState
from flatout.data.inspection import inspection_copy
from flatout.data.intercept import recording
from flatout.data.keeping import CacheOptions, proved_store
from flatout.data.kept import SampleRecorder
from flatout.data.operation import NotBatchable
from flatout.data.pipelines import Pipelines
from flatout.data.source import fetched
from flatout.data.store import Store
from flatout.data.streams import restore_states, same_states, states

if TYPE_CHECKING:
    from torch.utils.data import Dataset

AT_A_TIME = 256  # samples fetched together when all are kept ahead
WATCHED_CLOSELY = 64  # batches in which one kept sample is fetched again; later every eighth
CHANGED = "samples are no longer kept: the script has changed its data set"


class KeptSamples:
    """Kept samples. Methods raise NotBatchable with the reason if samples may no longer be kept.

    With ``shared``, loader workers fill the same store. ``own`` holds the random generators of the data set.
    """

    def __init__(
        self, dataset: Dataset, keep: CacheOptions, pipelines: Pipelines, shared: bool, own: Sequence[Any]
    ) -> None:
        self.dataset = dataset
        self.pipelines = pipelines
        self.keep = keep
        self.own = own
        copy = inspection_copy(dataset)
        self.store: Store = proved_store(copy, lambda index: self._sample(copy, index), keep, shared, own)
        self.contents: DatasetState | None = DatasetState(dataset)
        self._fetched = False  # changes during a fetch are made by the data set's own code
        self._batches = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a spawned worker, which reads the pipelines and its own data set again."""
        return {**vars(self), "pipelines": Pipelines(), "own": [], "contents": None}

    def close(self) -> None:
        self.keep.memory.left_bytes += self.store.bytes

    def fill_all(self) -> None:
        if self.keep.handed_on is None:
            self._fetch_missing()
        else:
            self.keep.handed_on.fill(self.store, self._holds, self._fetch_missing)
        self.remember()

    def _fetch_missing(self) -> None:
        missing = (~self.store.filled).nonzero().flatten().tolist()
        for first in range(0, len(missing), AT_A_TIME):
            self._fill(missing[first : first + AT_A_TIME], self.dataset)

    def rows(self, indices: Sequence[Any], dataset: Dataset) -> Tensor | None:
        """Return the rows of these samples, fetching missing ones; None if one of them has no row."""
        if self.contents is not None and self.contents.changed():
            raise NotBatchable(CHANGED)
        self._fetched = True
        if {*map(type, indices)} != {int} or min(indices) < 0 or max(indices) >= self.store.rows:
            return None
        self._fetched = False
        rows = torch.tensor(indices)
        missing = rows[~self.store.filled[rows]].unique().tolist()
        if missing:
            self._fill(missing, dataset)
        self._batches += 1
        if self._batches <= WATCHED_CLOSELY or self._batches % 8 == 0:
            self._watch(indices[self._batches % len(indices)], dataset)
        return rows

    def remember(self) -> None:
        """Record the current state of the data set."""
        if self.contents is not None:
            self.contents.remember()

    @property
    def has_changed(self) -> bool:
        """Return whether the data set has changed, or may have, since samples were kept."""
        return self.contents is None or self.contents.changed()

    def pipelines_are(self, signature: object, pipelines: Pipelines) -> bool:
        """In a worker, return whether these pipelines have this signature and can replay the samples."""
        self.pipelines = pipelines
        return bool(pipelines.signature() == signature)

    def after_batch(self) -> None:
        if self._fetched:
            self.remember()

    def _sample(self, dataset: Dataset, index: int) -> Any:
        self._fetched = True
        keeping = SampleRecorder(self.pipelines)
        try:
            with recording(keeping):
                sample = fetched(dataset, [index])[0]
        except Exception as error:
            if keeping.answered:  # the data set's code got an image that is not computed yet
                raise NotBatchable(
                    "the data set looks at images whose random numbers are drawn with their batch"
                ) from error
            raise
        return keeping.sample(sample)

    def _holds(self, index: int) -> bool:
        """Return whether the store holds this sample as it is fetched now."""
        before = states(self.own)
        try:
            same = self.store.holds(index, self._sample(self.dataset, index)) and same_states(
                before, states(self.own)
            )
        except NotBatchable:
            same = False
        if not same:
            restore_states(before)
        return same

    def _fill(self, indices: Sequence[int], dataset: Dataset) -> None:
        before = states(self.own)
        try:
            samples = [self._sample(dataset, index) for index in indices]
            if not same_states(before, states(self.own)):
                raise NotBatchable("fetching a sample draws random numbers")
            self.store.put(indices, samples)
        except NotBatchable as why:
            restore_states(before)
            raise NotBatchable(f"samples are no longer kept: {why}") from why

    def _watch(self, index: int, dataset: Dataset) -> None:
        """Fetch one of the kept samples again, to detect changes."""
        before = states(self.own)
        try:
            sample = self._sample(dataset, index)
        except NotBatchable as why:
            restore_states(before)
            raise NotBatchable(f"samples are no longer kept: {why}") from why
        if not same_states(before, states(self.own)):
            restore_states(before)
            raise NotBatchable("samples are no longer kept: fetching one of them now draws random numbers")
        if not self.store.holds(index, sample):
            raise NotBatchable("samples are no longer kept: one of them has changed")


def opened(
    dataset: Dataset, keep: CacheOptions, pipelines: Pipelines, shared: bool, own: Sequence[Any], raw: bool
) -> KeptSamples:
    """Open a store of samples with remaining calls, or (``raw``) as returned. Raises NotBatchable."""
    try:
        return KeptSamples(dataset, keep, pipelines, shared, own)
    except NotBatchable:
        if not raw or not pipelines:
            raise
    pipelines.found.clear()
    return KeptSamples(dataset, keep, pipelines, shared, own)
