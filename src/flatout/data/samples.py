"""The kept samples of one data set, filled on demand and monitored for changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flatout.data.changes import DatasetState
from flatout.data.inspection import inspection_copy
from flatout.data.intercept import recording
from flatout.data.keeping import CacheOptions, tested_store
from flatout.data.kept import SampleRecorder
from flatout.data.operation import NotBatchable
from flatout.data.pipelines import Pipelines
from flatout.data.source import fetch_samples
from flatout.data.store import Store
from flatout.data.streams import restore_states, same_states, states

FETCH_SIZE = 256  # samples fetched together when all are kept ahead
ALWAYS_CHECKED_BATCHES = 64  # batches in which one kept sample is fetched again; later every eighth
CHANGED = "samples are no longer kept: the script has changed its data set"


class KeptSamples:
    """Kept samples. Methods raise NotBatchable with the reason if samples may no longer be kept.

    With ``shared``, loader workers fill the same store. ``rngs`` holds the random generators of the data set.
    """

    def __init__(
        self,
        dataset: Dataset,
        options: CacheOptions,
        pipelines: Pipelines,
        shared: bool,
        rngs: Sequence[Any],
    ) -> None:
        self.dataset = dataset
        self.pipelines = pipelines
        self.options = options
        self.rngs = rngs
        copy = inspection_copy(dataset)
        self.store: Store = tested_store(copy, lambda index: self._sample(copy, index), options, shared, rngs)
        self.dataset_state: DatasetState | None = DatasetState(dataset)
        self._ran_dataset_code = False  # changes during a fetch are made by the data set's own code
        self._batches = 0

    def __getstate__(self) -> dict[str, Any]:
        """The state for a spawned worker, which reads the pipelines and its own data set again."""
        return {**vars(self), "pipelines": Pipelines(), "rngs": [], "dataset_state": None}

    def close(self) -> None:
        self.options.memory.remaining_bytes += self.store.bytes

    def fill_all(self) -> None:
        if self.options.shared_samples is None:
            self._fetch_missing()
        else:
            self.options.shared_samples.fill(self.store, self._holds, self._fetch_missing)
        self.record()

    def _fetch_missing(self) -> None:
        missing = (~self.store.filled).nonzero().flatten().tolist()
        for first in range(0, len(missing), FETCH_SIZE):
            self._fill(missing[first : first + FETCH_SIZE], self.dataset)

    def rows(self, indices: Sequence[Any], dataset: Dataset) -> Tensor | None:
        """The rows of these samples, fetching missing ones; None if one of them has no row."""
        if self.dataset_state is not None and self.dataset_state.changed():
            raise NotBatchable(CHANGED)
        self._ran_dataset_code = True
        if {*map(type, indices)} != {int} or min(indices) < 0 or max(indices) >= self.store.rows:
            return None
        self._ran_dataset_code = False
        rows = torch.tensor(indices)
        missing = rows[~self.store.filled[rows]].unique().tolist()
        if missing:
            self._fill(missing, dataset)
        self._batches += 1
        if self._batches <= ALWAYS_CHECKED_BATCHES or self._batches % 8 == 0:
            self._recheck(indices[self._batches % len(indices)], dataset)
        return rows

    def record(self) -> None:
        """Record the current state of the data set."""
        if self.dataset_state is not None:
            self.dataset_state.record()

    @property
    def has_changed(self) -> bool:
        """Whether the data set has changed, or may have, since samples were kept."""
        return self.dataset_state is None or self.dataset_state.changed()

    def adopt_pipelines(self, signature: object, pipelines: Pipelines) -> bool:
        """In a worker, return whether these pipelines have this signature and can replay the samples."""
        self.pipelines = pipelines
        return bool(pipelines.signature() == signature)

    def after_batch(self) -> None:
        if self._ran_dataset_code:
            self.record()

    def _sample(self, dataset: Dataset, index: int) -> Any:
        self._ran_dataset_code = True
        recorder = SampleRecorder(self.pipelines)
        try:
            with recording(recorder):
                sample = fetch_samples(dataset, [index])[0]
        except Exception as error:
            if recorder.returned_placeholder:  # the data set's code got an image that is not computed yet
                raise NotBatchable(
                    "the data set looks at images whose random numbers are drawn with their batch"
                ) from error
            raise
        return recorder.sample(sample)

    def _holds(self, index: int) -> bool:
        before = states(self.rngs)
        try:
            same = self.store.holds(index, self._sample(self.dataset, index)) and same_states(
                before, states(self.rngs)
            )
        except NotBatchable:
            same = False
        if not same:
            restore_states(before)
        return same

    def _fill(self, indices: Sequence[int], dataset: Dataset) -> None:
        before = states(self.rngs)
        try:
            samples = [self._sample(dataset, index) for index in indices]
            if not same_states(before, states(self.rngs)):
                raise NotBatchable("fetching a sample draws random numbers")
            self.store.put(indices, samples)
        except NotBatchable as why:
            restore_states(before)
            raise NotBatchable(f"samples are no longer kept: {why}") from why

    def _recheck(self, index: int, dataset: Dataset) -> None:
        before = states(self.rngs)
        try:
            sample = self._sample(dataset, index)
        except NotBatchable as why:
            restore_states(before)
            raise NotBatchable(f"samples are no longer kept: {why}") from why
        if not same_states(before, states(self.rngs)):
            restore_states(before)
            raise NotBatchable("samples are no longer kept: fetching one of them now draws random numbers")
        if not self.store.holds(index, sample):
            raise NotBatchable("samples are no longer kept: one of them has changed")


def open_samples(
    dataset: Dataset,
    options: CacheOptions,
    pipelines: Pipelines,
    shared: bool,
    rngs: Sequence[Any],
    split_optional: bool,
) -> KeptSamples:
    """Open a store of samples with remaining calls, or (``split_optional``) as returned. Raises NotBatchable."""
    try:
        return KeptSamples(dataset, options, pipelines, shared, rngs)
    except NotBatchable:
        if not split_optional or not pipelines:
            raise
    pipelines.entries.clear()
    return KeptSamples(dataset, options, pipelines, shared, rngs)
