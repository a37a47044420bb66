"""What stands in the place of a loader's data set, and which loaders leave that place to nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

from flatout.pipeline.streams import WorkerStreams


class Source:
    """A feed in the data set's place; to everybody but torch's fetcher it is the data set.

    With streams, the random numbers are those that loader workers would have drawn.
    """

    def __init__(self, dataset: Any, batch_of: Callable[[Any], Any], streams: WorkerStreams | None) -> None:
        vars(self).update(_dataset=dataset, _batch_of=batch_of, _streams=streams)

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        with self._streams.batch() if self._streams is not None else nullcontext():
            return self._batch_of(indices)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._dataset)

    def __reduce__(self) -> tuple[Any, ...]:
        return Source, (self._dataset, self._batch_of, self._streams)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getattr__(self, name: str) -> Any:  # get_worker_info().dataset, in a worker's init function
        if name.startswith("__") or "_dataset" not in vars(self):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        dataset = self._dataset
        type(dataset).__setattr__(dataset, name, value)  # type: ignore[call-arg]


class Box:
    """A sample of a stream on its way to collation: taken out of its box, it lies in no list of torch's."""

    __slots__ = ("_sample",)

    def __init__(self, sample: Any) -> None:
        self._sample = sample

    def take(self) -> Any:
        sample, self._sample = self._sample, None
        return sample


class StreamSource(Source):
    """A feed in the place of an IterableDataset: ``batch_of`` answers an iterator over boxes."""

    def __iter__(self) -> Iterator[Box]:
        boxes: Iterator[Box] = vars(self)["_batch_of"](self._dataset)
        return boxes

    def __reduce__(self) -> tuple[Any, ...]:
        return StreamSource, (self._dataset, self._batch_of, self._streams)


def cannot_feed(loader: Any) -> str:
    dataset = loader.dataset
    if is_pipe(dataset):
        return "the data set is a DataPipe, which torch iterates over in its own way"
    if loader.batch_sampler is None:
        return "the DataLoader has batch_size=None, so the data set makes its batches itself"
    return ""


def cannot_keep(loader: Any) -> str:
    """Why samples of this loader have no index under which they could be kept."""
    if is_stream(loader.dataset):
        return "the data set is an IterableDataset, which hands out its samples in an order of its own"
    if not hasattr(loader.dataset, "__len__"):
        return "the data set has no length"
    return ""


def is_stream(dataset: Any) -> bool:
    """An IterableDataset inherits a ``__getitem__`` that only raises."""
    return not hasattr(dataset, "__getitem__") or any(kind.__name__ == "IterableDataset" for kind in type(dataset).__mro__)


def is_pipe(dataset: Any) -> bool:
    """A pipe is sharded by its iterator."""
    return any(kind.__name__ in ("IterDataPipe", "MapDataPipe") for kind in type(dataset).__mro__)


def fetched(dataset: Any, indices: Sequence[Any]) -> Any:
    """The samples as torch's fetcher takes them from a map-style data set."""
    together = getattr(dataset, "__getitems__", None)
    return together(indices) if together else [dataset[index] for index in indices]
