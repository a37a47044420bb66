"""Records and replays the DataLoaders of a script.

While recording, an iterator logs which samples it requests, and each new shape of its batches. During a
replay its sampler runs for real, and its batches are fake tensors of those shapes: no sample is loaded and no
worker starts. At the resume point it continues with real batches. Without workers it continues by itself.
With workers, a new iterator starts workers in the saved state (`flatout.checkpoint.worker_state`).

A data set without indices, and batches that hold more than tensors, are loaded again.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from flatout.agent.ledger import Ledger
from flatout.checkpoint.loader_kinds import in_place
from flatout.checkpoint.resume.batch_holders import BatchHolders
from flatout.checkpoint.resume.replayed_iterator import (
    BEGAN,
    ReplayedIterator,
    info,
    made_batch,
    metas_of,
    order_of,
)
from flatout.checkpoint.resume.value_log import ValueLog
from flatout.checkpoint.worker_state import BatchWithWorkerState, Find, WorkerStateCollate

FETCHED = -1  # instead of a shape: the batch holds more than tensors
LOADED = "flatout_loaded"  # an attribute of tensors that a replay has loaded again


class ReplayedLoaders:
    """Hooks the DataLoader iterators.

    ``begins`` is called before a batch is taken. ``find`` returns the random generators that an object holds.
    """

    def __init__(self, value_log: ValueLog, ledger: Ledger, begins: Callable[[], None], find: Find) -> None:
        self.value_log, self.ledger, self.begins, self.find = value_log, ledger, begins, find
        self.iterators: list[weakref.ref[Any]] = []
        self.fetched: set[int] = set()  # numbers of the iterators whose batches hold more than tensors
        self.fetches = False  # load batches during a replay, too
        self.skipped = 0  # batches of this process that the replay did not load
        self._shapes: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._coming: ReplayedIterator | None = None  # the iterator whose real counterpart is being created

    def install(self) -> None:
        base, many, ledger = _BaseDataLoaderIter, _MultiProcessingDataLoaderIter, self.ledger
        ledger.set(base, "__init__", self._numbered(base.__init__))
        ledger.set(base, "_next_index", self._asked(base._next_index))
        ledger.set(base, "__next__", self._taken(base.__next__))
        ledger.set(many, "__init__", self._carries(many.__init__))
        ledger.set(many, "_reset", self._begins_again(many._reset))
        ledger.set(many, "_next_data", self._unpacked(many._next_data))
        ledger.set(DataLoader, "_get_iterator", self._chosen(DataLoader._get_iterator))
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            ledger.set(kind, "fetch", self._fetched(kind.fetch, kind is fetch._MapDatasetFetcher))

    # -- iterators ------------------------------------------------------------------------------------------

    def _numbered(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log = self.value_log

        @wraps(really)
        def init(iterator: _BaseDataLoaderIter, loader: DataLoader) -> None:
            really(iterator, loader)
            carrier = vars(iterator).get("flatout_carrier")
            if carrier is not None:
                carrier.collate_fn, iterator._collate_fn = iterator._collate_fn, carrier
            if self._coming is not None:
                iterator._base_seed = self._coming._base_seed
            elif value_log.observes:
                value_log.event(BEGAN)
                iterator.flatout_number = len(self.iterators)
                self.iterators.append(weakref.ref(iterator))

        return init

    def _asked(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log = self.value_log

        @wraps(really)
        def next_index(iterator: _BaseDataLoaderIter) -> Any:
            index = really(iterator)
            # workers of iterable data sets finish in any order
            if value_log.observes and (iterator._dataset_kind == 0 or not iterator._num_workers):
                value_log.event(order_of(index))
            return index

        return next_index

    def _taken(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log = self.value_log

        @wraps(really)
        def take(iterator: Any) -> Any:
            if value_log.observes:
                self.begins()
                if "flatout_holders" not in vars(iterator):
                    iterator.flatout_holders = BatchHolders()
                iterator.flatout_holders.taken(sys._getframe(1))
            return really(iterator)

        return take

    def _fetched(self, really: Callable[..., Any], by_index: bool) -> Callable[..., Any]:
        """Wrap the fetch of a process without workers."""
        value_log = self.value_log

        @wraps(really)
        def hooked_fetch(fetcher: object, index: object) -> Any:
            if not value_log.observes:
                return really(fetcher, index)
            if value_log.going and by_index:
                batch = self._played()
                if batch is not None and not self.fetches:
                    self.skipped += 1
                    return batch
            with value_log.unheard:
                batch = really(fetcher, index)
            if value_log.going:
                mark_loaded(batch)
            elif by_index:
                self._note(batch)
            return batch

        return hooked_fetch

    # -- shapes of batches ----------------------------------------------------------------------------------

    def _note(self, batch: object) -> int:
        """Log the number of a batch's shape, and the shape itself when it is new."""
        metas = metas_of(batch)
        number = FETCHED if metas is None else self._numbers.get(metas)
        if number is None:
            number = self._numbers[metas] = len(self._numbers)
            self.value_log.put(number, 2)
            self.value_log.put(info(batch), 3)
        else:
            self.value_log.put(number, 2)
        return number

    def _played(self) -> Any:
        """Return a fake batch; None if the batch must be loaded."""
        value_log = self.value_log
        number = value_log.take(2)
        if number == FETCHED:
            return None
        if number == len(self._shapes):
            metadata = value_log.take(3)
            self._shapes.append(metadata)
            self._numbers[metas_of(made_batch(metadata))] = number
        return made_batch(self._shapes[number])

    # -- loader workers -------------------------------------------------------------------------------------

    def _carries(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Make workers report their state."""
        value_log = self.value_log

        @wraps(really)
        def init(iterator: _BaseDataLoaderIter, loader: DataLoader) -> None:
            coming = self._coming
            if (not value_log.observes and coming is None) or loader._dataset_kind != 0:
                really(iterator, loader)
                return
            iterator.flatout_given = coming.given if coming is not None else 0
            iterator.flatout_worker_states = (
                list(coming.worker_states) if coming is not None else [None] * loader.num_workers
            )
            again = coming.again if coming is not None else 0
            iterator.flatout_carrier = carrier = WorkerStateCollate(
                None, loader.worker_init_fn, self.find, list(iterator.flatout_worker_states), again
            )
            with in_place(loader, {"worker_init_fn": carrier.begins}):
                really(iterator, loader)

        return init

    def _begins_again(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def reset(iterator: _BaseDataLoaderIter, loader: DataLoader, first_iter: bool = False) -> None:
            if not first_iter and "flatout_given" in vars(iterator):
                iterator.flatout_given = 0
            really(iterator, loader, first_iter)

        return reset

    def _unpacked(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log = self.value_log

        @wraps(really)
        def next_data(iterator: _BaseDataLoaderIter) -> Any:
            data = really(iterator)
            if type(data) is BatchWithWorkerState:
                worker = iterator.flatout_given % iterator._num_workers
                iterator.flatout_given += 1
                if data.worker_state is not None:
                    iterator.flatout_worker_states[worker] = data.worker_state
                data = data.batch
            if value_log.observes and iterator._dataset_kind == 0:
                if value_log.going:
                    value_log.take(2)
                elif self._note(data) == FETCHED:
                    self.fetched.add(iterator.flatout_number)
            return data

        return next_data

    def _chosen(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log = self.value_log

        @wraps(really)
        def get_iterator(loader: DataLoader) -> Any:
            if (
                not (value_log.going and value_log.observes)
                or not loader.num_workers
                or loader._dataset_kind != 0
                or len(self.iterators) in self.fetched
            ):
                return really(loader)
            loader.check_worker_number_rationality()
            return ReplayedIterator(self, loader)

        return get_iterator

    # -- checkpoint and resume point ------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """Return the worker states by the number of their iterator; call it between two batches."""
        found = {}
        for number, ref in enumerate(self.iterators):
            iterator = ref()
            real = iterator.real if type(iterator) is ReplayedIterator else iterator
            if real is not None and "flatout_given" in vars(real):
                found[number] = {
                    "given": real.flatout_given,
                    "worker_states": list(real.flatout_worker_states),
                }
        return {"workers": found, "fetched": sorted(self.fetched)}

    def held(self) -> dict[str, Any]:
        """Return the variables of the generators that pass batches on; they may be a batch ahead."""
        return {
            f"batches {number}, {name}": variables
            for number, ref in enumerate(self.iterators)
            if (holders := getattr(ref(), "flatout_holders", None)) is not None
            for name, variables in holders.variables()
        }

    def waiting(self) -> list[Any]:
        """Return tensors of batches that real workers have finished and the script has not taken yet."""
        tasks = [
            task
            for ref in self.iterators
            if (iterator := ref()) is not None
            for task in vars(iterator).get("_task_info", {}).values()
        ]
        return [leaf for leaf in pytree.tree_leaves(tasks) if isinstance(leaf, torch.Tensor)]

    def go_on(self, place: dict[str, Any]) -> list[str]:
        """Replace replayed iterators by real ones. Return the reasons for those that cannot be replaced."""
        said = []
        for number, ref in enumerate(self.iterators):
            iterator = ref()
            if type(iterator) is ReplayedIterator:
                stood = place["workers"].get(number)
                if stood is None:
                    continue  # exhausted, but the script still holds it
                if stood["given"] != iterator.given:
                    said.append(
                        f"a loader with workers had returned {stood['given']} batches at the checkpoint, and {iterator.given} now"
                    )
                    continue
                iterator.becomes_real(stood["worker_states"])
        return said


def mark_loaded(batch: object) -> None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            vars(leaf)[LOADED] = True
