"""The iterator of a DataLoader during a replay."""

from __future__ import annotations

import numbers
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from flatout.checkpoint.loader_kinds import in_place
from flatout.checkpoint.resume.fake_tensors import ReplayTensor

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from flatout.checkpoint.resume.replayed_loaders import ReplayedLoaders

BEGAN = 1  # an event; the output of a sampler is a different one


class ReplayedIterator(_BaseDataLoaderIter):
    """Iterator of a DataLoader with workers during a replay: its sampler runs as far ahead as usual."""

    def __init__(self, batches: ReplayedLoaders, loader: DataLoader) -> None:
        self.batches, self.loader = batches, weakref.ref(loader)
        self.ahead = loader.prefetch_factor * loader.num_workers
        self.worker_states: list[Any] = [None] * loader.num_workers
        self.real: _MultiProcessingDataLoaderIter | None = None
        super().__init__(loader)
        self._start(loader)

    def _start(self, loader: DataLoader) -> None:
        super()._reset(loader, True)
        self.given, self._asked = 0, deque[Any]()
        self._since_first: deque[Any] = deque(maxlen=loader.num_workers)  # the last batches returned
        for _ in range(self.ahead):
            self._ask()

    def _ask(self) -> None:
        try:
            self._asked.append(self._next_index())
        except StopIteration:
            pass

    def _reset(self, loader: DataLoader, first_iter: bool = False) -> None:
        """Start another epoch of persistent workers."""
        if self.real is not None:
            self.real._reset(loader, first_iter)
        else:
            self._start(loader)

    def _next_data(self) -> Any:
        if self.real is not None:
            return self.real._next_data()
        if not self._asked:
            raise StopIteration
        self._since_first.append(self._asked.popleft())
        self.given += 1
        self._ask()
        return self.batches._played()

    @property
    def again(self) -> int:
        """Number of batches to load again, so that each worker continues at its turn."""
        return self.given % self._num_workers

    def becomes_real(self, worker_states: list[Any]) -> None:
        loader = self.loader()
        assert loader is not None
        self.worker_states = worker_states
        given = list(self._since_first)
        left = _Left(chain(given[len(given) - self.again :], self._asked, self._sampler_iter))
        self.batches._coming = self
        try:
            with in_place(loader, {"batch_sampler" if self._auto_collation else "sampler": left}):
                self.real = _MultiProcessingDataLoaderIter(loader)
        finally:
            self.batches._coming = None
        self.real._index_sampler = self._index_sampler
        self.real.flatout_given -= self.again
        for _ in range(self.again):
            self.real._next_data()
        self.real.flatout_number = self.flatout_number


class _Left:
    """Sampler over the remaining indices of another one."""

    def __init__(self, indices: Iterable[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


def metas_of(batch: Any) -> Any:
    """Return the shapes of a batch as a key; None if it holds more than tensors."""
    kind = type(batch)
    if kind is torch.Tensor or kind is ReplayTensor:
        return (
            (batch.shape, batch.stride(), batch.dtype, batch.device)
            if batch.layout is torch.strided
            else None
        )
    if kind is list or kind is tuple:
        found = (kind, *map(metas_of, batch))
    elif kind is dict:
        found = (kind, *batch, *map(metas_of, batch.values()))
    else:
        return None
    return None if None in found else found


def info(batch: Any) -> Any:
    """Describe a batch as JSON: tensors are objects; lists, tuples and dicts name their type."""
    if isinstance(batch, torch.Tensor):
        return {
            "shape": list(batch.shape),
            "strides": list(batch.stride()),
            "dtype": str(batch.dtype).removeprefix("torch."),
            "device": str(batch.device),
        }
    if isinstance(batch, dict):
        return ("dict", *((key, info(value)) for key, value in batch.items()))
    return (type(batch).__name__, *map(info, batch))


def made_batch(metadata: Any) -> Any:
    if isinstance(metadata, dict):
        return ReplayTensor(
            (
                tuple(metadata["shape"]),
                tuple(metadata["strides"]),
                getattr(torch, metadata["dtype"]),
                torch.device(metadata["device"]),
            )
        )
    kind, *inside = metadata
    if kind == "dict":
        return {key: made_batch(value) for key, value in inside}
    made = [made_batch(each) for each in inside]
    return made if kind == "list" else tuple(made)


def order_of(index: object) -> int:
    """Hash the output of a sampler.

    None and other objects are excluded: their hashes differ between processes.
    """
    if isinstance(index, list):
        kinds = set(map(type, index))
        return (
            hash(tuple(index))
            if kinds == {int} or all(issubclass(kind, (numbers.Integral, str)) for kind in kinds)
            else BEGAN
        )
    return hash(index) if isinstance(index, (numbers.Integral, str)) else BEGAN
