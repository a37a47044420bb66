"""Records and replays the DataLoaders of a script.

While recording, an iterator logs which samples it requests, and each new shape of its batches. During a
replay its sampler runs for real, and its batches are fake tensors of those shapes: no sample is loaded and no
worker starts. At the resume point it continues with real batches. Without workers it continues by itself.
With workers, a new iterator starts workers in the saved state (`flatout.checkpoint.random_states`).

A data set without indices, and batches that hold more than tensors, are loaded again.
"""

import gc
import inspect
import numbers
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from itertools import chain
from types import FrameType, GeneratorType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader
from torch.utils.data._utils import fetch
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from flatout.agent.frames import FLATOUT_DIR
from flatout.agent.ledger import Ledger
from flatout.agent.names import variables_of
from flatout.checkpoint.loading import overridden
from flatout.checkpoint.random_states import BatchWithWorkerState, FindGenerators, WorkerStateCollate
from flatout.checkpoint.resume.gradient_sources import ReplayTensor, TensorSpec, spec_of
from flatout.checkpoint.resume.value_log import ValueLog

# Finds the generators through which the batches of a loader reach the script.
#
# A library may wrap a loader in a generator that is one batch ahead of the script. Only the loop that runs holds
# the generator, so no variable leads to the batch that waits in it.

# of Python's garbage collector; a generator is usually young when it takes the first batch
GC_GENERATIONS = (0, 1, 2)


class BatchHolders:
    """The generators on the stack when a batch is taken, innermost first."""

    def __init__(self) -> None:
        self._refs: list[weakref.ref[Any]] = []

    def update(self, frame: FrameType | None) -> None:
        """Look for the generators when another one takes batches. ``frame``: the caller of the iterator."""
        while frame is not None and frame.f_code.co_filename.startswith(FLATOUT_DIR):
            frame = frame.f_back
        if frame is None or not frame.f_code.co_flags & inspect.CO_GENERATOR:
            self._refs.clear()
            return
        innermost = self._refs[0]() if self._refs else None
        if innermost is None or innermost.gi_frame is not frame:
            self._refs = list(map(weakref.ref, _running(frame)))

    def variables(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Yield the variables of each suspended generator, by a name that is the same in each run."""
        for i, ref in enumerate(self._refs):
            generator = ref()
            if generator is not None and generator.gi_suspended:
                yield f"{generator.__qualname__} {i}", variables_of(generator.gi_frame, always=True)


def _running(frame: FrameType | None) -> list[Any]:
    frames = []
    while frame is not None:
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            frames.append(frame)
        frame = frame.f_back
    codes = {frame.f_code for frame in frames}
    generators: dict[int, Any] = {}
    for generation in GC_GENERATIONS:
        for item in gc.get_objects(generation):
            if type(item) is GeneratorType and item.gi_running and item.gi_code in codes:
                generators[id(item.gi_frame)] = item
        if all(id(frame) in generators for frame in frames):
            break
    return [generators[id(frame)] for frame in frames if id(frame) in generators]


Function = Callable[..., Any]
ITERATOR_CREATED = 1  # an event; the output of a sampler is a different one
NOT_TENSORS = -1  # instead of a shape: the batch holds more than tensors
LOADED_ATTRIBUTE = "flatout_loaded"  # an attribute of tensors that a replay has loaded again


class ReplayedLoaders:
    """Hooks the DataLoader iterators.

    ``on_batch`` is called before a batch is taken. ``find`` returns the random generators that an object holds."""

    def __init__(
        self, value_log: ValueLog, ledger: Ledger, on_batch: Callable[[], None], find: FindGenerators
    ) -> None:
        self.value_log, self.ledger, self.on_batch, self.find = value_log, ledger, on_batch, find
        self.iterators: list[weakref.ref[Any]] = []
        self.reloaded: set[int] = set()  # numbers of the iterators whose batches hold more than tensors
        self._shapes: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._becoming_real: ReplayedIterator | None = (
            None  # the iterator whose real counterpart is being created
        )

    def install(self) -> None:
        base, many, ledger = _BaseDataLoaderIter, _MultiProcessingDataLoaderIter, self.ledger
        ledger.set(base, "__init__", self._wrap_init(base.__init__))
        ledger.set(base, "_next_index", self._wrap_next_index(base._next_index))
        ledger.set(base, "__next__", self._wrap_next(base.__next__))
        ledger.set(many, "__init__", self._wrap_workers_init(many.__init__))
        ledger.set(many, "_process_data", self._wrap_process_data(many._process_data))
        ledger.set(DataLoader, "_get_iterator", self._wrap_get_iterator(DataLoader._get_iterator))
        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
            ledger.set(kind, "fetch", self._wrap_fetch(kind.fetch, kind is fetch._MapDatasetFetcher))

    # -- iterators

    def _wrap_init(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def init(iterator: _BaseDataLoaderIter, loader: DataLoader) -> None:
            original(iterator, loader)
            collate = vars(iterator).get("flatout_carrier")
            if collate is not None:
                collate.collate_fn, iterator._collate_fn = iterator._collate_fn, collate
            if self._becoming_real is not None:
                iterator._base_seed = self._becoming_real._base_seed
            elif value_log.observes:
                value_log.event(ITERATOR_CREATED)
                iterator.flatout_number = len(self.iterators)
                self.iterators.append(weakref.ref(iterator))

        return init

    def _wrap_next_index(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def next_index(iterator: _BaseDataLoaderIter) -> Any:
            index = original(iterator)
            # workers of iterable data sets finish in any order
            if value_log.observes and (iterator._dataset_kind == 0 or not iterator._num_workers):
                value_log.event(index_hash(index))
            return index

        return next_index

    def _wrap_next(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def take(iterator: Any) -> Any:
            if value_log.observes:
                self.on_batch()
                if "flatout_holders" not in vars(iterator):
                    iterator.flatout_holders = BatchHolders()
                iterator.flatout_holders.update(sys._getframe(1))
            return original(iterator)

        return take

    def _wrap_fetch(self, original: Function, by_index: bool) -> Function:
        value_log = self.value_log

        @wraps(original)
        def hooked_fetch(fetcher: object, index: object) -> Any:
            if not value_log.observes:
                return original(fetcher, index)
            if value_log.replaying and by_index:
                batch = self._fake_batch()
                if batch is not None:
                    return batch
            with value_log.unrecorded:
                batch = original(fetcher, index)
            if value_log.replaying:
                mark_loaded(batch)
            elif by_index:
                self._log_shape(batch)
            return batch

        return hooked_fetch

    # -- shapes of batches

    def _log_shape(self, batch: object) -> int:
        key = batch_key(batch)
        number = NOT_TENSORS if key is None else self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self.value_log.put(number, 2)
            self.value_log.put(describe_batch(batch), 3)
        else:
            self.value_log.put(number, 2)
        return number

    def _fake_batch(self) -> Any:
        value_log = self.value_log
        number = value_log.take(2)
        if number == NOT_TENSORS:
            return None
        if number == len(self._shapes):
            shape = value_log.take(3)
            self._shapes.append(shape)
            self._numbers[batch_key(fake_batch(shape))] = number
        return fake_batch(self._shapes[number])

    # -- loader workers

    def _wrap_workers_init(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def init(iterator: _BaseDataLoaderIter, loader: DataLoader) -> None:
            replayed = self._becoming_real
            if (not value_log.observes and replayed is None) or loader._dataset_kind != 0:
                original(iterator, loader)
                return
            states, refetches = [None] * loader.num_workers, 0
            if replayed is not None:
                states, refetches = replayed.states, replayed.refetches
            iterator.flatout_states = list(states)
            iterator.flatout_carrier = collate = WorkerStateCollate(
                None, loader.worker_init_fn, self.find, list(states), refetches
            )
            with overridden(loader, {"worker_init_fn": collate.init_worker}):
                original(iterator, loader)

        return init

    def _wrap_process_data(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def process(iterator: _BaseDataLoaderIter, data: object, worker: int) -> Any:
            batch = original(iterator, data, worker)
            if type(batch) is BatchWithWorkerState:
                if batch.worker_state is not None:
                    iterator.flatout_states[worker] = batch.worker_state
                batch = batch.batch
            if value_log.observes and iterator._dataset_kind == 0:
                if value_log.replaying:
                    value_log.take(2)
                elif self._log_shape(batch) == NOT_TENSORS:
                    self.reloaded.add(iterator.flatout_number)
            return batch

        return process

    def _wrap_get_iterator(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def get_iterator(loader: DataLoader) -> Any:
            if (
                not (value_log.replaying and value_log.observes)
                or not loader.num_workers
                or loader._dataset_kind != 0
                or len(self.iterators) in self.reloaded
            ):
                return original(loader)
            loader.check_worker_number_rationality()
            return ReplayedIterator(self, loader)

        return get_iterator

    # -- checkpoint and resume point

    def place(self) -> dict[str, Any]:
        """Return the worker states by the number of their iterator; call it between two batches."""
        workers = {}
        for number, ref in enumerate(self.iterators):
            iterator = ref()
            real = iterator.real if type(iterator) is ReplayedIterator else iterator
            if real is not None and "flatout_states" in vars(real):
                workers[number] = list(real.flatout_states)
        return {"workers": workers, "reloaded": sorted(self.reloaded)}

    def generator_variables(self) -> dict[str, Any]:
        """Return the variables of the generators that pass batches on; they may be a batch ahead."""
        return {
            f"batches {number}, {name}": variables
            for number, ref in enumerate(self.iterators)
            if (holders := getattr(ref(), "flatout_holders", None)) is not None
            for name, variables in holders.variables()
        }

    def prefetched_tensors(self) -> list[Any]:
        """Return tensors of batches that real workers have finished and the script has not taken yet."""
        tasks = [
            task
            for ref in self.iterators
            if (iterator := ref()) is not None
            for task in vars(iterator).get("_task_info", {}).values()
        ]
        return [leaf for leaf in pytree.tree_leaves(tasks) if isinstance(leaf, torch.Tensor)]

    def resume(self, place: dict[str, Any]) -> None:
        """Replace replayed iterators by real ones, except exhausted ones that the script still holds."""
        for number, ref in enumerate(self.iterators):
            iterator, states = ref(), place["workers"].get(number)
            if type(iterator) is ReplayedIterator and states is not None:
                self._becoming_real = iterator
                try:
                    iterator.become_real(states)
                finally:
                    self._becoming_real = None


class ReplayedIterator(_BaseDataLoaderIter):
    """Iterator of a DataLoader with workers during a replay: its sampler runs as far ahead as usual."""

    def __init__(self, batches: ReplayedLoaders, loader: DataLoader) -> None:
        self.batches, self.loader = batches, weakref.ref(loader)
        self.ahead = loader.prefetch_factor * loader.num_workers
        self.states: list[Any] = [None] * loader.num_workers  # of its workers
        self.real: _MultiProcessingDataLoaderIter | None = None
        super().__init__(loader)
        self._start(loader)

    def _start(self, loader: DataLoader) -> None:
        super()._reset(loader, True)
        self.consumed, self._indices_ahead = 0, deque[Any]()
        self._recent: deque[Any] = deque(maxlen=loader.num_workers)  # indices of the last batches returned
        for _ in range(self.ahead):
            self._prefetch()

    def _prefetch(self) -> None:
        try:
            self._indices_ahead.append(self._next_index())
        except StopIteration:
            pass

    def _reset(self, loader: DataLoader, first_iter: bool = False) -> None:
        if self.real is not None:
            self.real._reset(loader, first_iter)
        else:
            self._start(loader)

    def _next_data(self) -> Any:
        if self.real is not None:
            return self.real._next_data()
        if not self._indices_ahead:
            raise StopIteration
        self._recent.append(self._indices_ahead.popleft())
        self.consumed += 1
        self._prefetch()
        return self.batches._fake_batch()

    @property
    def refetches(self) -> int:
        """Number of batches to load again, so that each worker continues at its turn."""
        return self.consumed % self._num_workers

    def become_real(self, states: list[Any]) -> None:
        loader = self.loader()
        assert loader is not None
        self.states, recent = states, list(self._recent)
        remaining = _RemainingIndices(
            chain(recent[len(recent) - self.refetches :], self._indices_ahead, self._sampler_iter)
        )
        with overridden(loader, {"batch_sampler" if self._auto_collation else "sampler": remaining}):
            self.real = _MultiProcessingDataLoaderIter(loader)
        self.real._index_sampler = self._index_sampler
        for _ in range(self.refetches):
            self.real._next_data()
        self.real.flatout_number = self.flatout_number


class _RemainingIndices:
    """Sampler over the remaining indices of another one."""

    def __init__(self, indices: Iterable[Any]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[Any]:
        return iter(self.indices)


def mark_loaded(batch: object) -> None:
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            vars(leaf)[LOADED_ATTRIBUTE] = True


def batch_key(batch: Any) -> Any:
    """Return the shapes of a batch as a key; None if it holds more than tensors."""
    kind = type(batch)
    if kind is torch.Tensor or kind is ReplayTensor:
        return spec_of(batch) if batch.layout is torch.strided else None
    if kind is list or kind is tuple:
        parts = (kind, *map(batch_key, batch))
    elif kind is dict:
        parts = (kind, *batch, *map(batch_key, batch.values()))
    else:
        return None
    return None if None in parts else parts


def describe_batch(batch: Any) -> Any:
    """Describe a batch as JSON: tensors are objects; lists, tuples and dicts name their type."""
    if isinstance(batch, torch.Tensor):
        return {
            "shape": list(batch.shape),
            "strides": list(batch.stride()),
            "dtype": str(batch.dtype).removeprefix("torch."),
            "device": str(batch.device),
        }
    if isinstance(batch, dict):
        return ("dict", *((key, describe_batch(value)) for key, value in batch.items()))
    return (type(batch).__name__, *map(describe_batch, batch))


def fake_batch(shape: Any) -> Any:
    """Return a fake batch from its description."""
    if isinstance(shape, dict):
        size, stride = tuple(shape["shape"]), tuple(shape["strides"])
        dtype, device = getattr(torch, shape["dtype"]), torch.device(shape["device"])
        return ReplayTensor(TensorSpec(size, stride, dtype, device))
    kind, *parts = shape
    if kind == "dict":
        return {key: fake_batch(value) for key, value in parts}
    items = [fake_batch(part) for part in parts]
    return items if kind == "list" else tuple(items)


def index_hash(index: object) -> int:
    """Hash the output of a sampler.

    None and other objects are excluded: their hashes differ between processes."""
    if isinstance(index, list):
        kinds = set(map(type, index))
        return (
            hash(tuple(index))
            if kinds == {int} or all(issubclass(kind, (numbers.Integral, str)) for kind in kinds)
            else ITERATOR_CREATED
        )
    return hash(index) if isinstance(index, (numbers.Integral, str)) else ITERATOR_CREATED
