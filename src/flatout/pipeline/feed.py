"""How the batches of one DataLoader are made: its samples kept, its transforms done to whole batches.

A feed stands where torch's fetcher expects a data set: `__getitems__` answers the finished batch, and collation has nothing left to do.
Batches are those that the loader would have made by itself: same values, same random draws, same types. The first one is made both
ways and compared; where that fails, or anything else is not as expected, the loader goes on as it was, and `refusal` says why.

    sample -> steps[:kept] -> store -> steps[kept:start], one by one -> operations, as a batch -> steps[end:], one by one -> collation
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatout.pipeline.ahead import Ahead
from flatout.pipeline.chain import Changed, Leaf, Stop, Twin, aside
from flatout.pipeline.changes import Contents, Parameters
from flatout.pipeline.device import CopiesAhead, Resident, Twins
from flatout.pipeline.draws import Words
from flatout.pipeline.finishing import collated, gathered
from flatout.pipeline.keeping import PROVED, Keep, proved_store
from flatout.pipeline.likeness import different
from flatout.pipeline.lowering import shape_of
from flatout.pipeline.operation import Unknown
from flatout.pipeline.source import Source, cannot_feed, is_stream
from flatout.pipeline.store import Store
from flatout.pipeline.streams import WorkerStreams, own_generators, put_back, same_states, states, untouched
from flatout.pipeline.ways import InPlace, Way, leaves_of, spread, ways_of

AT_A_TIME = 256  # samples that are fetched together when all are kept ahead
CHANGED = "samples are no longer kept: the script has changed its data set"
WATCHED_CLOSELY = 64  # batches in which one kept sample is fetched again; later in every eighth


class Feed:
    """`prepare` is called in the script's process whenever the loader is iterated over; batches may be asked for in its workers."""

    def __init__(self, loader: Any) -> None:
        self.dataset = loader.dataset
        self.batched = self.light = False  # light: transforms with much arithmetic stay with the single image
        self.keep: Keep | None = None
        self.as_workers = 0  # the batches are drawn as this many loader workers would have drawn them
        self.ahead = 0  # so many batches are made ahead, by a thread
        self.resident: Resident | None = None  # where all samples are to be kept, and batches made
        self.copies: tuple[int, Twins] | None = None  # so many batches are copied ahead to where the script moves them
        self.refusal = cannot_feed(loader)
        self.keeps_nothing = ""  # why samples are no longer kept
        self._plain_collate = loader.collate_fn
        self.ways: list[Way] = []
        self.store: Store | None = None
        self._workers = loader.num_workers > 0
        self._init = loader.worker_init_fn is not None
        self.listeners: dict[str, Callable[[str], None]] = {}  # wish -> who is told what became of it: keep, batched, order
        self._said: set[str] = set()
        self._twin: Twin | None = None
        self._at_once = False  # numbers are drawn as each sample is fetched, where something else draws between two samples
        self._checked_by: int | None = None
        self._batches = 0
        self._fetched = False
        self._own: list[Any] = []  # random generators of the data set
        self._contents: Contents | None = None
        self._parameters: list[Parameters] = []  # of each way, also where whole samples are kept and no way is left to go
        self._thread = 0  # that of the script, where another makes batches

    def __getstate__(self) -> dict[str, Any]:
        """For a worker: what only the script's process knows or needs stays behind, and the twin is made again from the data set there."""
        return {**vars(self), "listeners": {}, "_twin": None, "_own": [], "_contents": None, "_thread": 0}

    # -- getting ready ----------------------------------------------------------------------------------------------

    def begin(self, iterator: Any) -> Any:
        """A new iterator over the loader, and with it an epoch: what stands in the data set's place, None where nothing may."""
        if not iterator._auto_collation or is_stream(self.dataset):
            self._say_refusal()
            return None
        self.prepare()
        self._thread = threading.get_ident()
        if self.ahead and iterator._num_workers == 0:
            iterator._next_data = Ahead(iterator, self.ahead, partial(self._say, "order"), own_generators(self.dataset))
        if self.copies is not None and (iterator._num_workers or self.as_workers or self.ahead):
            iterator._next_data = CopiesAhead(iterator, *self.copies)
        elif self.copies is not None:
            self._say("copies", "the program makes its batches itself, and taking them ahead would change the order of random numbers")
        return Source(self.dataset, self.__getitems__, WorkerStreams(self.as_workers, iterator._base_seed, self.dataset) if self.as_workers else None)

    def prepare(self) -> None:
        """Read the data set's pipelines as they are now."""
        if self.refusal:
            self._say_refusal()
        if self.refusal or not (self.batched or self.keep):
            self.ways, self.store, self._twin = [], None, None
            return
        self._own = own_generators(self.dataset)
        with untouched(self._own):
            try:
                self._read()
            except Unknown as why:
                self._refuse(str(why))
            except Changed:
                self._refuse("its pipeline changes while it is read")
            except Exception as error:
                self._refuse(f"its samples could not be looked at ({type(error).__name__}: {error})")

    def _read(self) -> None:
        before = [(way.transform, way.steps) for way in self.ways]
        if self.store is not None and self._contents is not None and self._contents.changed(thoroughly=True):
            self._keep_nothing(CHANGED)
        if any(parameters.changed() for parameters in self._parameters):
            self._close_store()
        self.ways = self._find_ways()
        self._twin = self._make_twin()
        if self.keep is None:
            return
        try:
            if self.store is None or [(way.transform, way.steps) for way in self.ways] != before:
                self._close_store()
                self.store = self._open_store(self.keep)
            if self.keep.ahead:
                missing = (~self.store.filled).nonzero().flatten().tolist()
                for at in range(0, len(missing), AT_A_TIME):
                    self._fill(missing[at:at + AT_A_TIME])
            self._contents = Contents(self.dataset)
            if self.resident is not None:
                if self.store.rows < len(self.dataset) or any(way.kept < way.start for way in self.ways):
                    raise Unknown("not all of it can lie on the device: some samples do not fit, or some transforms need them one by one")
                self.store.move_to(self.resident.device)
        except Unknown as why:
            if not self.batched:
                raise
            self._keep_nothing(f"samples are fetched each time: {why}")
            self._read()

    def _find_ways(self) -> list[Way]:
        self._parameters = []
        if self.batched:
            try:
                ways = ways_of(self.dataset, True, self.light, self.keep is not None)
                self._parameters = [way.parameters for way in ways]
                for reason in dict.fromkeys(reason for way in ways if way.lowered for reason in way.lowered.reasons):
                    self._say("batched", reason)
                return ways
            except Unknown as why:
                if self.keep is None:
                    raise
                self.batched = False
                self._say("batched", str(why))
        try:
            ways = ways_of(self.dataset, False, False, keeping=True)
        except InPlace:
            raise
        except Unknown:
            return []  # samples are kept as they come out
        self._parameters = [way.parameters for way in ways]
        return [] if all(way.kept == len(way.steps) for way in ways) else ways

    @property
    def heavy(self) -> bool:
        """Whether transforms with much arithmetic are done to whole batches."""
        return any(operation.heavy for way in self.ways if way.lowered for operation in way.lowered.operations)

    def _make_twin(self, dataset: Any = None) -> Twin | None:
        if not self.ways:
            return None
        dataset = self.dataset if dataset is None else dataset
        until = [way.kept if self.keep else way.start for way in self.ways]
        draws = [way.lowered if self._at_once and self.keep is None else None for way in self.ways]
        return Twin(dataset, [Stop(at, way.steps[:until[at]], draws[at]) for at, way in enumerate(self.ways)])

    def _open_store(self, keep: Keep) -> Store:
        copy = aside(self.dataset)
        twin = self._make_twin(copy)
        return proved_store(copy, copy if twin is None else twin.dataset, keep, self._workers, self._own)

    # -- batches ----------------------------------------------------------------------------------------------------

    @staticmethod
    def collate(batch: Any) -> Any:
        """What is left to do for the loader's collation: nothing."""
        return batch

    def try_out(self) -> str:
        """Make a small batch both ways; why not, where they are not the same. The random generators stay as they are."""
        with untouched(self._own):
            if not self.refusal and (self.ways or self.store):
                self._first(spread(len(self.dataset), PROVED))
        return self.refusal

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The finished batch of these samples."""
        if self.refusal or not (self.ways or self.store):
            return self._plain(indices)
        if self._checked_by != os.getpid():
            self._checked_by = os.getpid()
            return self._first(indices)
        # Where kept samples are only gathered nothing else can draw than what is done to the batch.
        before = torch.get_rng_state() if self._gathers else states(self._own)
        try:
            return self._made(indices)
        except Exception as error:
            if self._thread and threading.get_ident() != self._thread:
                raise  # generators are not moved beside the script; it is made again there
            why = str(error) if isinstance(error, (Changed, Unknown)) else f"a batch could not be made ({type(error).__name__}: {error})"
        torch.set_rng_state(before) if isinstance(before, Tensor) else put_back(before)
        self._refuse(why)
        return self._plain(indices)  # if it is the data's own fault, it shows again, as if nothing had been before

    @property
    def _gathers(self) -> bool:
        """Whether every sample is kept, with nothing left to do for one by itself."""
        store = self.store
        return store is not None and store.full and not self._at_once and all(way.kept == way.start for way in self.ways)

    def _plain(self, indices: Sequence[Any]) -> Any:
        fetch = getattr(self.dataset, "__getitems__", None)
        return self._plain_collate(fetch(indices) if fetch else [self.dataset[index] for index in indices])

    def _first(self, indices: Sequence[Any]) -> Any:
        """The plain batch; the other is made of it too, and must be the same, down to where the random generators end."""
        self._own = own_generators(self.dataset)
        if self.store is not None and torch.utils.data.get_worker_info() is not None and self._init_changed():
            self._keep_nothing("samples are not kept: the script's worker_init_fn may change the data set")
        start = states(self._own)
        batch = self._plain(indices)
        end, why = states(self._own), ""
        if self._contents is not None:  # by its own code
            self._contents.remember()
        for at_once in dict.fromkeys((self._at_once, True)):
            put_back(start)
            try:
                self._at_once = at_once
                self._twin = self._make_twin(aside(self.dataset))  # what fetching does to the data set was done once already
                why = different(batch, self._made(indices), self.apart)
                why = why or ("" if same_states(end, states(self._own)) else "random numbers would be drawn in another order")
            except Exception as error:
                why = f"its first batch could not be made ({type(error).__name__}: {error})"
            if not why or not any(way.lowered for way in self.ways):
                break
        put_back(end)
        if why:
            self._refuse(why)
        else:
            self._twin = self._make_twin()
            if self._contents is not None:
                self._contents.remember()
        return batch

    def _init_changed(self) -> bool:
        return self._init and (self._contents is None or self._contents.changed())

    @property
    def apart(self) -> float:
        """The farthest a value may be from the plain batch's; 0 where every bit is the same."""
        return max((way.lowered.apart for way in self.ways if way.lowered), default=0.0)

    def _made(self, indices: Sequence[Any]) -> Any:
        if any(parameters.changed() for parameters in self._parameters):
            raise Changed("the script changes its transforms while batches are made")
        if self.store is not None and self._contents is not None and self._contents.changed():
            self._keep_nothing(CHANGED)
        if self._twin is not None:
            self._twin.carry_over()
        self._batches += 1
        self._fetched = False
        at = self._rows(indices)
        if at is not None:
            self._watch(indices)
        if at is None or self.store is None:
            batch = collated(self.ways, self._in_order(partial(self._fetched_on, indices)))
        elif not self._at_once and all(way.kept == way.start for way in self.ways):
            batch = self._gathered(self.store, at)
        else:
            batch = collated(self.ways, self._in_order(partial(self._gone_on, self.store, at)))
        if self._twin is not None:
            self._twin.carry_over()
        if self._fetched and self._contents is not None:
            self._contents.remember()
        return batch

    def _in_order(self, samples: Callable[[], list[Any]]) -> list[Any]:
        """Samples; where something else draws between two images, an image draws as it is fetched, and not with the batch."""
        if self._at_once or not any(way.lowered and way.lowered.draws for way in self.ways):
            return samples()
        before = states(self._own)
        found = samples()
        if same_states(before, states(self._own)):
            return found
        put_back(before)
        self._at_once = True
        self._twin = self._make_twin()
        return samples()

    def _fetched_on(self, indices: Sequence[Any]) -> list[Any]:
        samples = []
        for index in indices:
            samples.append(self._sample(index))
            if self.keep is not None and self.ways:
                for leaf in leaves_of(samples[-1]):
                    self._go_on(leaf)
        return samples

    def _gone_on(self, store: Store, rows: Tensor) -> list[Any]:
        samples = store.samples(rows)
        for sample in samples:
            for leaf in leaves_of(sample):
                self._go_on(leaf)
        return samples

    def _sample(self, index: Any) -> Any:
        self._fetched = True  # whatever changes meanwhile was changed by the data set's own code
        return self.dataset[index] if self._twin is None else self._twin.dataset[index]

    def _go_on(self, leaf: Leaf) -> None:
        """The steps between a kept image and the batch."""
        way = self.ways[leaf.place]
        for step in way.steps[way.kept:way.start]:
            leaf.image = step(leaf.image)
        if way.lowered is not None and self._at_once:
            with Words() as words:
                leaf.numbers = way.lowered.row(shape_of(leaf.image), words)

    # -- what is kept -----------------------------------------------------------------------------------------------

    def _rows(self, indices: Sequence[Any]) -> Tensor | None:
        """The rows of these samples, fetched and kept where they were not yet; None where one of them cannot be."""
        if self.store is None or {*map(type, indices)} != {int} or min(indices) < 0 or max(indices) >= self.store.rows:
            return None
        rows = torch.tensor(indices)
        missing = rows[~self.store.filled[rows]].unique().tolist()
        if missing:
            try:
                self._fill(missing)
            except Unknown as why:
                self._keep_nothing(f"samples are no longer kept: {why}")
                return None
        return rows

    def _fill(self, indices: Sequence[int]) -> None:
        if self.store is not None:
            before = states(self._own)
            samples = [self._sample(index) for index in indices]
            if not same_states(before, states(self._own)):
                put_back(before)
                raise Unknown("fetching a sample draws random numbers")
            self.store.put(indices, samples)

    def _watch(self, indices: Sequence[int]) -> None:
        """Fetch one of the kept samples again: data may change."""
        if self.store is not None and (self._batches <= WATCHED_CLOSELY or self._batches % 8 == 0):
            index = indices[self._batches % len(indices)]
            before = states(self._own)
            sample = self._sample(index)
            if not same_states(before, states(self._own)):
                put_back(before)
                self._keep_nothing("samples are no longer kept: fetching one of them draws random numbers now")
            elif not self.store.holds(index, sample):
                self._keep_nothing("samples are no longer kept: one of them has changed")

    def _gathered(self, store: Store, rows: Tensor) -> Any:
        if self.resident is not None:
            return self.resident.made(partial(gathered, self.ways, store, rows))
        return gathered(self.ways, store, rows)

    def _close_store(self) -> None:
        if self.store is not None and self.keep is not None:
            self.keep.memory.left_bytes += self.store.bytes
        self.store = None

    def _keep_nothing(self, why: str) -> None:
        self._close_store()
        self.keep, self.keeps_nothing = None, why
        if self._twin is not None:
            self._twin.carry_over()
            self._twin = self._make_twin()
        self._say("keep", why)

    def _refuse(self, why: str) -> None:
        self._close_store()
        self.refusal, self._twin = why, None
        self._say_refusal()

    def _say_refusal(self) -> None:
        for wish, wished in (("keep", self.keep), ("batched", self.batched)):
            if wished:
                self._say(wish, self.refusal)

    def _say(self, wish: str, sentence: str) -> None:
        listener = self.listeners.get(wish)  # in a worker there is none
        if listener is not None and sentence not in self._said:
            self._said.add(sentence)
            listener(sentence)


def tried(loaders: Iterable[Any], wish: Callable[[Feed], None]) -> tuple[list[Feed], str]:
    """A feed for each of these DataLoaders, with the wishes that ``wish`` gives it, tried out; and why, where none of them can be fed."""
    feeds = []
    for loader in loaders:
        feed = Feed(loader)
        wish(feed)
        feed.prepare()
        feed.try_out()
        feeds.append(feed)
    if not feeds:
        return [], "the script prepares its batches itself, without a DataLoader"
    return feeds, feeds[0].refusal if all(feed.refusal for feed in feeds) else ""
