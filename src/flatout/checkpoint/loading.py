"""The position of a training in its data, so that another process can resume with exactly the next batches.

`LoaderPosition` iterates over a loader, epoch by epoch, and counts. Its `place` goes into a checkpoint: the state of
the random generators at the start of the epoch, the number of batches consumed, and the present state. To
resume, a new process starts the epoch as before and skips the consumed batches:

    a DataLoader over a data set with indices   skips the sampler and fetches nothing; loader workers start in
                                                the saved state (`flatout.checkpoint.worker_state`)
    a loader with a state_dict of its own       loads that state
    a list                                      skips entries
    anything else                               fetches batches again and discards them

``inexact`` has a sentence for everything that cannot be resumed exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.checkpoint.loader_kinds import (
    FETCHED,
    INDICES,
    ROWS,
    STATEFUL,
    draws_as_it_goes,
    has_state,
    in_place,
    kind_of,
    length,
    samplers_of,
    things_of,
)
from flatout.checkpoint.random_states import Interleaving, random_states, set_random_states
from flatout.checkpoint.worker_state import BatchWithWorkerState, Find, WorkerStateCollate, changed, counters

if TYPE_CHECKING:
    from torch.utils.data import DataLoader, Sampler

SHAPE = {
    "kind": "loader",
    "samples": "samples in the data",
    "batches": "batches in an epoch",
    "batch": "batch size of the loader",
    "workers": "loader workers",
    "persistent": "persistent workers",
    "order": "order of samples",
}
ENDED_EARLY = "the data ended before the resume point"
NONE_LEFT = object()


class LoaderPosition:
    """Iterates over a loader and tracks the position.

    ``find`` returns the random generators that an object holds, for those of a data set or a sampler.
    ``begun``: whether an epoch is in progress. ``given``: its consumed batches. ``passed_over``: batches that
    were fetched again to reach a position.
    """

    def __init__(self, torch: ModuleType, loader: DataLoader, find: Find | None = None) -> None:
        self.torch, self.loader, self._find = torch, loader, find
        self.kind = kind_of(torch, loader)
        self.workers = int(getattr(loader, "num_workers", 0) or 0) if self.kind in (INDICES, FETCHED) else 0
        self.persistent = bool(self.workers and getattr(loader, "persistent_workers", False))
        self.begun, self.given, self.passed_over = False, 0, 0
        self._dataset = getattr(loader, "dataset", None)
        self._things = things_of(loader, self.kind)
        self._first_counters = [counters(thing) for thing in self._things]
        self._own: list[Any] | None = None  # random generators of the loader and its data
        self._sought: dict[str, Any] | None = None
        self._seeking: tuple[dict[str, Any] | None, int] = (
            None,
            0,
        )  # for the sampler: a place, and the number of batches to skip
        self._asked = False  # whether this iterator has started the sampler
        self._began: dict[str, Any] = {}  # states before this epoch's iterator, sampler and first batch
        self._made: dict[str, Any] | None = None  # random states before persistent workers were started
        self._later = False  # an epoch of persistent workers that is not their first
        self._worker_states: list[dict[str, Any] | None] = [
            None
        ] * self.workers  # of each worker, after its last consumed batch
        self._turn = 0  # the worker whose batch is next
        self._said: dict[str, None] = {}
        self._watch = Interleaving()
        self._watched = (
            not self.workers
            if self.kind == FETCHED
            else self.kind == INDICES and any(map(draws_as_it_goes, samplers_of(loader)))
        )

    # -- the position ----------------------------------------------------------------------------------------

    def place(self) -> dict[str, Any]:
        """The position, between two batches."""
        return {
            "kind": self.kind,
            "shape": self.shape(),
            "begun": self.begun,
            "given": self.given,
            "began": dict(self._began) if self.begun else None,
            "now": self._now(),
            "made": self._made,
            "later": self._later,
            "workers": list(self._worker_states),
            "state": self.loader.state_dict() if self.kind == STATEFUL and self.begun else None,
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

    def go_on(self, place: dict[str, Any]) -> list[str]:
        """Resume the next epoch at a position. Returns what differs since, as sentences."""
        mine, theirs = self.shape(), place["shape"]
        self._sought = place
        if place["kind"] != self.kind or theirs["workers"] != self.workers:
            self._sought = {**place, "workers": [None] * self.workers, "made": None}
        self._later = bool(place["later"])
        return [
            f"{words}: {theirs.get(name)} when it was saved, {mine[name]} now"
            for name, words in SHAPE.items()
            if theirs.get(name) != mine[name]
        ]

    @property
    def coming(self) -> int:
        """Batches of the next epoch that are already consumed."""
        return self._sought["given"] if self._sought is not None and self._sought["begun"] else 0

    @property
    def inexact(self) -> list[str]:
        """Why a process that resumes from a position would get different batches; empty if it would not."""
        reasons = list(self._said)
        if self._watch.kinds:
            whose = "the sampler draws" if self.kind == INDICES else "the loader draws"
            reasons.append(
                f"{whose} random numbers during iteration ({', '.join(sorted(self._watch.kinds))}), interleaved with the training"
            )
        if self.workers and getattr(self.loader, "in_order", True) is False:
            reasons.append("loader workers return batches in completion order (in_order=False)")
        if self.workers and self.kind == INDICES and hasattr(self._dataset, "state_dict"):
            reasons.append("the data set has a state_dict, and each loader worker has a copy of that state")
        if self._later and self.kind == FETCHED:
            reasons.append(
                "persistent workers read data without indices: their state at the start of this epoch is unknown"
            )
        return reasons

    # -- an epoch --------------------------------------------------------------------------------------------

    def epoch(self) -> Iterator[Any]:
        """The batches of one epoch, or the rest of the resumed one."""
        place, self._sought = self._sought, None
        within = place is not None and place["begun"]
        self.begun, self.given = False, place["given"] if place is not None and within else 0
        iterator = self._iterator(place, within)
        self.begun = True
        if place is not None and within:
            self._put(place["now"], advanced=True)
        while (batch := self._next(iterator)) is not NONE_LEFT:
            self.given += 1
            yield batch

    def over(self) -> None:
        """Call at the end of an epoch: the next one starts from its beginning."""
        self.begun, self.given = False, 0

    def _iterator(self, place: dict[str, Any] | None, within: bool) -> Iterator[Any]:
        """An iterator that starts like the epoch and is advanced to the position."""
        if place is not None:
            self._put(place["began"]["iterator"] if within else place["now"])
        self._began = {"iterator": self._now()}
        self._watch.begin()
        if self.persistent:
            self._later = (
                self._later
                if within
                else self._made is not None or (place is not None and place["made"] is not None)
            )
            if place is not None and place["made"] is not None:
                set_random_states(self.torch, place["made"], self._generators())
                self._made = place["made"]
            elif self._made is None:
                self._made = self._began["iterator"]["random"]
        if self.kind == INDICES:
            iterator, again = self._through_indices(place, within)
        else:
            if self.kind == STATEFUL and place is not None and within:
                self.loader.load_state_dict(place["state"])
            iterator, again = iter(self.loader), self.given if self.kind != STATEFUL else 0
        for _ in range(again):
            if self._next(iterator) is NONE_LEFT:
                self._said[ENDED_EARLY] = None
                break
            self.passed_over += self.kind != ROWS
        return iterator

    def _next(self, iterator: Iterator[Any]) -> Any:
        if self._watched and self.kind == FETCHED:
            before = self._randoms()
            batch = next(iterator, NONE_LEFT)
            self._watch.observe(before, self._randoms())
            return batch
        batch = next(iterator, NONE_LEFT)
        return self._unpacked(batch) if type(batch) is BatchWithWorkerState else batch

    def _unpacked(self, carried: BatchWithWorkerState) -> Any:
        worker, self._turn = self._turn, (self._turn + 1) % self.workers
        if carried.worker_state is not None:
            self._worker_states[worker] = carried.worker_state
        for sentence in carried.said:
            self._said[f"in loader worker {worker}, {sentence}"] = None
        return carried.batch

    # -- a DataLoader whose samples have indices -------------------------------------------------------------

    def _through_indices(self, place: dict[str, Any] | None, within: bool) -> tuple[Iterator[Any], int]:
        """The iterator, and the number of batches to fetch again to restore the workers' turn."""
        again = self.given % self.workers if self.workers else 0
        self._seeking, self._asked = (place, self.given - again), False
        self._turn = 0
        batched = self.loader.batch_sampler is not None
        order = _Order(self, self.loader.batch_sampler if batched else self.loader.sampler)
        instead: dict[str, Any] = {"batch_sampler" if batched else "sampler": order}
        if self.workers:
            if place is not None:
                self._worker_states = list(place["workers"])
            if not self.persistent and not within:
                self._worker_states = [None] * self.workers
            carrier = WorkerStateCollate(
                self.loader.collate_fn,
                self.loader.worker_init_fn,
                self._find,
                list(self._worker_states),
                again,
            )
            instead |= {"collate_fn": carrier, "worker_init_fn": carrier.begins}
        with in_place(self.loader, instead):
            iterator = iter(self.loader)
        self._seeking = None, 0
        return iterator, again

    def order_begins(self, sampler: Sampler) -> Iterator[Any]:
        """The iterator that replaces a sampler's.

        Called when torch starts it, because some samplers draw then.

        A new iterator with workers starts it twice and draws a seed in between.
        """
        place, passed = self._seeking
        within = place is not None and place["begun"]
        again, self._asked = self._asked, True
        if place is not None and again:
            self._put(place["began"]["sampler"] if within else place["now"])
        self._began["sampler"] = self._now()
        indices, first = iter(sampler), place["began"]["first"] if place is not None and within else None
        if (
            within and not self.workers
        ):  # before restoring random states; workers get their first batches at once
            self._pass(indices, first, passed)
            return self._rest(indices)
        return self._all(indices, first, passed)

    def _all(self, indices: Iterator[Any], first: dict[str, Any] | None, passed: int) -> Iterator[Any]:
        self._pass(indices, first, passed)
        yield from self._rest(indices)

    def _pass(self, indices: Iterator[Any], first: dict[str, Any] | None, passed: int) -> None:
        if first is not None:
            self._put(first)
        self._began["first"] = self._now()
        for _ in range(passed):
            if next(indices, NONE_LEFT) is NONE_LEFT:
                self._said[ENDED_EARLY] = None
                break
        if self._watched:
            self._watch.observe(after := self._randoms(), after)

    def _rest(self, indices: Iterator[Any]) -> Iterator[Any]:
        if not self._watched:
            yield from indices
            return
        while True:
            before = self._randoms()
            index = next(indices, NONE_LEFT)
            self._watch.observe(before, self._randoms())
            if index is NONE_LEFT:
                return
            yield index

    # -- the present state -----------------------------------------------------------------------------------

    def _generators(self) -> list[Any]:
        if self._own is None:
            held = [
                getattr(self.loader, name, None)
                for name in ("generator", "sampler", "batch_sampler", "dataset", "collate_fn")
            ]
            self._own = (
                self._find([*held, *self._things]) if self._find is not None and self.kind != ROWS else []
            )
        return self._own

    def _randoms(self) -> dict[str, Any]:
        return random_states(self.torch, self._generators(), devices=False)

    def _now(self) -> dict[str, Any]:
        return {
            "random": self._randoms(),
            "states": [thing.state_dict() if has_state(thing) else None for thing in self._things],
            "counters": [
                changed(before, counters(thing))
                for before, thing in zip(self._first_counters, self._things, strict=True)
            ],
        }

    def _put(self, stood: dict[str, Any], advanced: bool = False) -> None:
        """Restore a state. ``advanced``: an iterator has been advanced to the position, and its objects with it.

        Then changes by the program (`set_epoch`) stay.
        """
        for sentence in set_random_states(self.torch, stood["random"], self._generators()):
            self._said[sentence] = None
        if advanced and self.kind == STATEFUL:
            return
        for thing, remembered, state in zip(self._things, stood["counters"], stood["states"], strict=False):
            if remembered:
                vars(thing).update(remembered)
            if (
                state is not None
                and has_state(thing)
                and (not advanced or (thing is self._dataset and self.kind == INDICES and not self.workers))
            ):
                thing.load_state_dict(state)


class _Order:
    """Replaces the sampler of a DataLoader while its iterator is made and in that iterator.

    Persistent workers iterate over it again for each epoch.
    """

    def __init__(self, reading: LoaderPosition, sampler: Sampler) -> None:
        self.reading, self.sampler = reading, sampler

    def __iter__(self) -> Iterator[Any]:
        return self.reading.order_begins(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)
