"""The position of a training in its data, so that another process can resume with exactly the next batches.

`LoaderPosition` iterates over a loader, epoch by epoch, and counts. Its `place` goes into a checkpoint: the state of
the random generators at the start of the epoch, the number of batches consumed, and the present state. To
resume, a new process starts the epoch as before and skips the consumed batches:

    a DataLoader over a data set with indices   skips the sampler and fetches nothing; loader workers start in
                                                the saved state (`flatout.checkpoint.random_states`)
    a loader with a state_dict of its own       loads that state
    a list                                      skips entries
    anything else                               fetches batches again and discards them

``inexact`` has a sentence for everything that cannot be resumed exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.checkpoint.random_states import (
    BatchWithWorkerState,
    FindGenerators,
    Interleaving,
    WorkerStateCollate,
    changed,
    counters,
    random_states,
    set_random_states,
)

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Sampler


# How a DataLoader's position can be restored: what its samplers and data set offer.

INDICES, STATEFUL, SEQUENCE, FETCHED = "indices", "state", "rows", "fetched"
# Samplers that draw when they start, not during iteration; `draws_while_iterating` knows the exceptions.
PLAIN_SAMPLERS = {
    "SequentialSampler",
    "RandomSampler",
    "SubsetRandomSampler",
    "WeightedRandomSampler",
    "BatchSampler",
    "DistributedSampler",
}


@contextmanager
def overridden(loader: DataLoader, overrides: dict[str, Any]) -> Iterator[None]:
    """Override attributes that a loader does not allow to set, while it makes an iterator."""
    attributes = vars(loader)
    before = {name: attributes[name] for name in overrides}
    attributes.update(overrides)
    try:
        yield
    finally:
        attributes.update(before)


def kind_of(torch: ModuleType, loader: DataLoader) -> str:
    """How to find a position in this loader again."""
    if type(loader) in (list, tuple):
        return SEQUENCE
    if has_state(loader):
        return STATEFUL
    loader_class = torch.utils.data.DataLoader
    if not isinstance(loader, loader_class) or isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return FETCHED
    is_plain = (
        type(loader).__iter__ is loader_class.__iter__
        and type(loader)._get_iterator is loader_class._get_iterator
    )
    return INDICES if is_plain else FETCHED  # a subclass may iterate differently


def samplers_of(loader: DataLoader) -> list[Any]:
    samplers: list[Any] = []
    queue = [getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)]
    while queue:
        sampler = queue.pop(0)
        if sampler is not None and not any(sampler is known for known in samplers):
            samplers.append(sampler)
            queue.append(getattr(sampler, "sampler", None))
    return samplers


def stateful_objects(loader: DataLoader, kind: str) -> list[Any]:
    """Objects that may hold a position: samplers, the data set, a custom loader."""
    if kind == SEQUENCE:
        return []
    things = (
        [*samplers_of(loader), getattr(loader, "dataset", None)] if hasattr(loader, "dataset") else [loader]
    )
    return [thing for thing in things if hasattr(thing, "__dict__")]


def has_state(thing: object) -> bool:
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")


def draws_while_iterating(sampler: Sampler) -> bool:
    """Whether a sampler may draw between two batches from a generator that other code uses, too."""
    kind = type(sampler)
    if kind in (list, tuple, range):
        return False
    if not kind.__module__.startswith("torch.utils.data.") or kind.__name__ not in PLAIN_SAMPLERS:
        return True
    if kind.__name__ != "RandomSampler" or sampler.generator is None:
        return False
    return bool(sampler.replacement or sampler.num_samples > len(sampler.data_source))


def length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # raised by user code
        return None


SHAPE_WORDS = {
    "kind": "loader",
    "samples": "samples in the data",
    "batches": "batches in an epoch",
    "batch": "batch size of the loader",
    "workers": "loader workers",
    "persistent": "persistent workers",
    "order": "order of samples",
}
ENDED_EARLY = "the data ended before the resume point"
EXHAUSTED = object()


class LoaderPosition:
    """Iterates over a loader and tracks the position.

    ``find`` returns the random generators that an object holds, for those of a data set or a sampler.
    ``in_epoch``: whether an epoch is in progress. ``consumed``: its consumed batches. ``refetched``: batches that
    were fetched again to reach a position."""

    def __init__(self, torch: ModuleType, loader: DataLoader, find: FindGenerators | None = None) -> None:
        self.torch, self.loader, self._find = torch, loader, find
        self.kind = kind_of(torch, loader)
        self.workers = int(getattr(loader, "num_workers", 0) or 0) if self.kind in (INDICES, FETCHED) else 0
        self.persistent = bool(self.workers and getattr(loader, "persistent_workers", False))
        self.in_epoch, self.consumed, self.refetched = False, 0, 0
        self._dataset = getattr(loader, "dataset", None)
        self._objects = stateful_objects(loader, self.kind)
        self._first_counters = [counters(thing) for thing in self._objects]
        self._own_generators: list[Any] | None = None  # random generators of the loader and its data
        self._target: dict[str, Any] | None = None
        # for the sampler: a place, and the number of batches to skip
        self._sampler_target: tuple[dict[str, Any] | None, int] = (None, 0)
        self._sampler_started = False  # whether this iterator has started the sampler
        self._epoch_start: dict[str, Any] = {}  # states before this epoch's iterator, sampler and first batch
        # random states before persistent workers were started
        self._worker_start: dict[str, Any] | None = None
        self._later_epoch = False  # an epoch of persistent workers that is not their first
        # of each worker, after its last consumed batch
        self._worker_states: list[dict[str, Any] | None] = [None] * self.workers
        self._next_worker = 0  # the worker whose batch is next
        self._messages: dict[str, None] = {}
        self._interleaving = Interleaving()
        self._watches_draws = (
            not self.workers
            if self.kind == FETCHED
            else self.kind == INDICES and any(map(draws_while_iterating, samplers_of(loader)))
        )

    # -- the position

    def place(self) -> dict[str, Any]:
        """The position, between two batches."""
        return {
            "kind": self.kind,
            "shape": self.shape(),
            "in_epoch": self.in_epoch,
            "consumed": self.consumed,
            "epoch_start": dict(self._epoch_start) if self.in_epoch else None,
            "now": self._present(),
            "worker_start": self._worker_start,
            "later_epoch": self._later_epoch,
            "workers": list(self._worker_states),
            "state": self.loader.state_dict() if self.kind == STATEFUL and self.in_epoch else None,
        }

    def shape(self) -> dict[str, Any]:
        """The properties of the loader that a position depends on."""
        return {
            "kind": type(self.loader).__name__,
            "samples": length(self._dataset),
            "batches": length(self.loader),
            "workers": self.workers,
            "batch": getattr(self.loader, "batch_size", None),
            "persistent": self.persistent,
            "order": [type(sampler).__name__ for sampler in samplers_of(self.loader)],
        }

    def resume(self, place: dict[str, Any]) -> list[str]:
        """Resume the next epoch at a position. Returns what differs since, as sentences."""
        now, before = self.shape(), place["shape"]
        self._target = place
        if place["kind"] != self.kind or before["workers"] != self.workers:
            self._target = {**place, "workers": [None] * self.workers, "worker_start": None}
        self._later_epoch = bool(place["later_epoch"])
        return [
            f"{label}: {before.get(name)} when it was saved, {now[name]} now"
            for name, label in SHAPE_WORDS.items()
            if before.get(name) != now[name]
        ]

    @property
    def already_consumed(self) -> int:
        """Batches of the next epoch that are already consumed."""
        return self._target["consumed"] if self._target is not None and self._target["in_epoch"] else 0

    @property
    def inexact(self) -> list[str]:
        """Why a process that resumes from a position would get different batches; empty if it would not."""
        reasons = list(self._messages)
        if self._interleaving.kinds:
            whose = "the sampler draws" if self.kind == INDICES else "the loader draws"
            reasons.append(
                f"{whose} random numbers during iteration ({', '.join(sorted(self._interleaving.kinds))}), interleaved with the training"
            )
        if self.workers and getattr(self.loader, "in_order", True) is False:
            reasons.append("loader workers return batches in completion order (in_order=False)")
        if self.workers and self.kind == INDICES and hasattr(self._dataset, "state_dict"):
            reasons.append("the data set has a state_dict, and each loader worker has a copy of that state")
        if self._later_epoch and self.kind == FETCHED:
            reasons.append(
                "persistent workers read data without indices: their state at the start of this epoch is unknown"
            )
        return reasons

    # -- an epoch

    def epoch(self) -> Iterator[Any]:
        """The batches of one epoch, or the rest of the resumed one."""
        place, self._target = self._target, None
        mid_epoch = place is not None and place["in_epoch"]
        self.in_epoch, self.consumed = False, place["consumed"] if place is not None and mid_epoch else 0
        iterator = self._iterator(place, mid_epoch)
        self.in_epoch = True
        if place is not None and mid_epoch:
            self._restore(place["now"], advanced=True)
        while (batch := self._next(iterator)) is not EXHAUSTED:
            self.consumed += 1
            yield batch

    def end_epoch(self) -> None:
        """Call at the end of an epoch: the next one starts from its beginning."""
        self.in_epoch, self.consumed = False, 0

    def _iterator(self, place: dict[str, Any] | None, mid_epoch: bool) -> Iterator[Any]:
        if place is not None:
            self._restore(place["epoch_start"]["iterator"] if mid_epoch else place["now"])
        self._epoch_start = {"iterator": self._present()}
        self._interleaving.begin()
        if self.persistent:
            worker_start = place["worker_start"] if place is not None else None
            if not mid_epoch:
                self._later_epoch = self._worker_start is not None or worker_start is not None
            if worker_start is not None:
                set_random_states(self.torch, worker_start, self._generators())
                self._worker_start = worker_start
            elif self._worker_start is None:
                self._worker_start = self._epoch_start["iterator"]["random"]
        if self.kind == INDICES:
            iterator, refetches = self._skip_indices(place, mid_epoch)
        else:
            if self.kind == STATEFUL and place is not None and mid_epoch:
                self.loader.load_state_dict(place["state"])
            iterator, refetches = iter(self.loader), self.consumed if self.kind != STATEFUL else 0
        for _ in range(refetches):
            if self._next(iterator) is EXHAUSTED:
                self._messages[ENDED_EARLY] = None
                break
            self.refetched += self.kind != SEQUENCE
        return iterator

    def _next(self, iterator: Iterator[Any]) -> Any:
        if self._watches_draws and self.kind == FETCHED:
            before = self._random_states()
            batch = next(iterator, EXHAUSTED)
            self._interleaving.observe(before, self._random_states())
            return batch
        batch = next(iterator, EXHAUSTED)
        return self._unpack(batch) if type(batch) is BatchWithWorkerState else batch

    def _unpack(self, result: BatchWithWorkerState) -> Any:
        worker, self._next_worker = self._next_worker, (self._next_worker + 1) % self.workers
        if result.worker_state is not None:
            self._worker_states[worker] = result.worker_state
        for sentence in result.messages:
            self._messages[f"in loader worker {worker}, {sentence}"] = None
        return result.batch

    # -- a DataLoader whose samples have indices

    def _skip_indices(self, place: dict[str, Any] | None, mid_epoch: bool) -> tuple[Iterator[Any], int]:
        refetches = self.consumed % self.workers if self.workers else 0
        self._sampler_target, self._sampler_started = (place, self.consumed - refetches), False
        self._next_worker = 0
        batched = self.loader.batch_sampler is not None
        sampler = _ResumedSampler(self, self.loader.batch_sampler if batched else self.loader.sampler)
        overrides: dict[str, Any] = {"batch_sampler" if batched else "sampler": sampler}
        if self.workers:
            if place is not None:
                self._worker_states = list(place["workers"])
            if not self.persistent and not mid_epoch:
                self._worker_states = [None] * self.workers
            collate = WorkerStateCollate(
                self.loader.collate_fn,
                self.loader.worker_init_fn,
                self._find,
                list(self._worker_states),
                refetches,
            )
            overrides |= {"collate_fn": collate, "worker_init_fn": collate.init_worker}
        with overridden(self.loader, overrides):
            iterator = iter(self.loader)
        self._sampler_target = None, 0
        return iterator, refetches

    def start_sampler(self, sampler: Sampler) -> Iterator[Any]:
        """The iterator that replaces a sampler's.

        Called when torch starts it, because some samplers draw then.

        A new iterator with workers starts it twice and draws a seed in between."""
        place, skipped = self._sampler_target
        mid_epoch = place is not None and place["in_epoch"]
        restarted, self._sampler_started = self._sampler_started, True
        if place is not None and restarted:
            self._restore(place["epoch_start"]["sampler"] if mid_epoch else place["now"])
        self._epoch_start["sampler"] = self._present()
        indices, first = (
            iter(sampler),
            place["epoch_start"]["first"] if place is not None and mid_epoch else None,
        )
        # before restoring random states; workers get their first batches at once
        if mid_epoch and not self.workers:
            self._skip(indices, first, skipped)
            return self._remaining(indices)
        return self._skip_later(indices, first, skipped)

    def _skip_later(
        self, indices: Iterator[Any], first: dict[str, Any] | None, skipped: int
    ) -> Iterator[Any]:
        self._skip(indices, first, skipped)
        yield from self._remaining(indices)

    def _skip(self, indices: Iterator[Any], first: dict[str, Any] | None, skipped: int) -> None:
        if first is not None:
            self._restore(first)
        self._epoch_start["first"] = self._present()
        for _ in range(skipped):
            if next(indices, EXHAUSTED) is EXHAUSTED:
                self._messages[ENDED_EARLY] = None
                break
        if self._watches_draws:
            self._interleaving.observe(after := self._random_states(), after)

    def _remaining(self, indices: Iterator[Any]) -> Iterator[Any]:
        if not self._watches_draws:
            yield from indices
            return
        while True:
            before = self._random_states()
            index = next(indices, EXHAUSTED)
            self._interleaving.observe(before, self._random_states())
            if index is EXHAUSTED:
                return
            yield index

    # -- the present state

    def _generators(self) -> list[Any]:
        if self._own_generators is None:
            self._own_generators = []
            if self._find is not None and self.kind != SEQUENCE:
                names = ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")
                holders = [getattr(self.loader, name, None) for name in names]
                self._own_generators = self._find([*holders, *self._objects])
        return self._own_generators

    def _random_states(self) -> dict[str, Any]:
        return random_states(self.torch, self._generators(), devices=False)

    def _present(self) -> dict[str, Any]:
        return {
            "random": self._random_states(),
            "states": [thing.state_dict() if has_state(thing) else None for thing in self._objects],
            "counters": [
                changed(before, counters(thing))
                for before, thing in zip(self._first_counters, self._objects, strict=True)
            ],
        }

    def _restore(self, state: dict[str, Any], advanced: bool = False) -> None:
        """Restore a state. ``advanced``: an iterator has been advanced to the position, and its objects with it.

        Then changes by the program (`set_epoch`) stay."""
        for sentence in set_random_states(self.torch, state["random"], self._generators()):
            self._messages[sentence] = None
        if advanced and self.kind == STATEFUL:
            return
        for thing, counted, loaded in zip(self._objects, state["counters"], state["states"], strict=False):
            if counted:
                vars(thing).update(counted)
            if (
                loaded is not None
                and has_state(thing)
                and (not advanced or (thing is self._dataset and self.kind == INDICES and not self.workers))
            ):
                thing.load_state_dict(loaded)


class _ResumedSampler:
    """Replaces the sampler of a DataLoader while its iterator is made and in that iterator.

    Persistent workers iterate over it again for each epoch."""

    def __init__(self, position: LoaderPosition, sampler: Sampler) -> None:
        self.position, self.sampler = position, sampler

    def __iter__(self) -> Iterator[Any]:
        return self.position.start_sampler(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)
