"""Objects that replace the data set of a loader, and the loaders for which this is not possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch.utils.data import DataLoader, Dataset

from flatout.data.streams import WorkerStreams


class FeedSource:
    """Replaces the data set with a feed. All code except torch's fetcher sees the data set.

    With streams, the random numbers are those of loader workers.
    """

    def __init__(
        self, dataset: Dataset, batch_of: Callable[[Any], Any], streams: WorkerStreams | None
    ) -> None:
        vars(self).update(_dataset=dataset, _batch_of=batch_of, _streams=streams)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        with self._streams.batch() if self._streams is not None else nullcontext():
            return self._batch_of(indices)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return FeedSource, (self._dataset, self._batch_of, self._streams)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: object) -> Any:
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:  # for get_worker_info().dataset in a worker's init function
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: object) -> None:
        dataset = self._dataset
        type(dataset).__setattr__(dataset, name, value)  # type: ignore[call-arg]


def cannot_feed(loader: DataLoader) -> str:
    dataset = loader.dataset
    if is_pipe(dataset):
        return "the data set is a DataPipe, which torch iterates over differently"
    if loader.batch_sampler is None:
        return "the DataLoader has batch_size=None, so the data set makes its batches itself"
    if is_stream(dataset):
        return "the data set is an IterableDataset, which yields its samples in its own order"
    return ""


def cannot_keep(loader: DataLoader) -> str:
    """Why samples of this loader cannot be kept by index, or an empty string."""
    return "" if hasattr(loader.dataset, "__len__") else "the data set has no length"


def is_stream(dataset: Dataset) -> bool:
    """Whether a data set is iterable-style. An IterableDataset inherits a raising ``__getitem__``."""
    return not hasattr(dataset, "__getitem__") or any(
        kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__
    )


def is_pipe(dataset: Dataset) -> bool:
    """Whether a data set is a DataPipe, which its iterator shards."""
    return any(kind.__name__ in ("IterDataPipe", "MapDataPipe") for kind in type(dataset).__mro__)


def fetch_samples(dataset: Dataset, indices: Sequence[Any]) -> Any:
    """Fetch samples from a map-style data set as torch's fetcher does."""
    fetch_batch = getattr(dataset, "__getitems__", None)
    return fetch_batch(indices) if fetch_batch else [dataset[index] for index in indices]


def spread(length: int, count: int) -> list[int]:
    """Return evenly spread indices of a data set, including the first and the last."""
    return sorted({number * (length - 1) // max(1, count - 1) for number in range(count)}) if length else []
