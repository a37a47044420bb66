"""What stands in the place of a loader's data set, and which loaders leave that place to nobody."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch.utils.data import Subset, default_collate

from flatout.pipeline.streams import WorkerStreams


class Source:
    """A feed in the data set's place; to everybody but torch's fetcher it is the data set.

    With streams, the random numbers are those that loader workers would have drawn.
    """

    def __init__(self, dataset: Any, batch_of: Callable[[Sequence[Any]], Any], streams: WorkerStreams | None) -> None:
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


def cannot_feed(loader: Any) -> str:
    dataset = loader.dataset
    if is_stream(dataset):
        return "the data set is an IterableDataset, which hands out its samples in an order of its own"
    if loader.batch_sampler is None:
        return "the data set makes its batches itself"
    if loader.collate_fn is not default_collate:
        return "the script has a collate function of its own"
    if not hasattr(dataset, "__len__"):
        return "the data set has no length"
    if hasattr(dataset, "__getitems__") and type(dataset).__getitems__ is not Subset.__getitems__:
        return f"{type(dataset).__name__} fetches whole batches by itself"
    return ""


def is_stream(dataset: Any) -> bool:
    """An IterableDataset inherits a ``__getitem__`` that only raises; a pipe is sharded by its iterator."""
    return not hasattr(dataset, "__getitem__") or any(kind.__name__ in ("IterableDataset", "MapDataPipe") for kind in type(dataset).__mro__)
