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
from torch.utils.data import default_collate

from flatout.pipeline.ahead import Ahead
from flatout.pipeline.device import CopiesAhead, Resident, Twins
from flatout.pipeline.following import PROBED, Following, learned
from flatout.pipeline.gathering import can_be_gathered, gathered
from flatout.pipeline.inspection import aside
from flatout.pipeline.intercept import INTERCEPTION
from flatout.pipeline.keeping import Keep, spread
from flatout.pipeline.kept import replayed
from flatout.pipeline.likeness import different
from flatout.pipeline.observing import Reading
from flatout.pipeline.operation import Unknown
from flatout.pipeline.pipelines import Pipelines
from flatout.pipeline.samples import CHANGED, KeptSamples, opened
from flatout.pipeline.source import Source, StreamSource, cannot_feed, cannot_keep, fetched, is_stream
from flatout.pipeline.store import Store
from flatout.pipeline.streaming import Stream
from flatout.pipeline.streams import WorkerStreams, own_generators, put_back, same_states, states, untouched


class Feed:
    """`prepare` is called in the script's process whenever the loader is iterated over; batches may be asked for in its workers.

    Pipelines are followed while `INTERCEPTION` is held.
    """

    def __init__(self, loader: Any) -> None:
        self.dataset = loader.dataset
        self.batched = self.light = False  # light: transforms with much arithmetic stay with the single image
        self.keep: Keep | None = None
        self.as_workers = 0  # the batches are drawn as this many loader workers would have drawn them
        self.ahead = 0  # so many batches are made ahead, by a thread
        self.resident: Resident | None = None  # where batches are to be made, and all samples to be kept
        self.copies: tuple[int, Twins] | None = None  # batches are copied to where the script moves them, and so many are taken ahead for that
        self._goes_to: dict[int, torch.device] = {}  # which tensor of a batch the script moves to which device
        self.refusal = self._left_alone = cannot_feed(loader)
        self.keeps_nothing = cannot_keep(loader)  # why samples are not, or no longer, kept
        self.following: Following | None = None
        self.samples: KeptSamples | None = None
        self.listeners: dict[str, Callable[[str], None]] = {}  # wish -> who is told what became of it: keep, batched, order
        self._plain_collate = loader.collate_fn
        self._workers = loader.num_workers > 0
        self._init = loader.worker_init_fn is not None
        self._said: set[str] = set()
        self._checked_by: int | None = None
        self._own: list[Any] = []  # random generators of the data set
        self._thread = 0  # that of the script, where another makes batches
        self._ledger_type: Any = None
        self._stream: Stream | None = None
        self._signature: Any = None  # of the pipelines that a worker should find, where it starts from nothing

    def __getstate__(self) -> dict[str, Any]:
        """For a worker that starts from nothing: it reads the pipelines again, from the data set that it is given."""
        signature = self.pipelines.signature() if self.following is not None else None
        left: dict[str, Any] = {"listeners": {}, "following": None, "_own": [], "_thread": 0, "_stream": None, "copies": None}
        return {**vars(self), **left, "_ledger_type": INTERCEPTION.ledger_type, "_signature": signature}

    @property
    def useless(self) -> str:
        """Why nothing that it was asked for is done."""
        return self.refusal or (self.keeps_nothing if not self.batched else "")

    @property
    def store(self) -> Store | None:
        return self.samples.store if self.samples is not None else None

    @property
    def pipelines(self) -> Pipelines:
        return self.following.pipelines if self.following is not None else Pipelines()

    @property
    def heavy(self) -> bool:
        """Whether transforms with much arithmetic are done to whole batches."""
        return any(operation.heavy for pipeline in self.pipelines.batched for operation in pipeline.own)

    @property
    def apart(self) -> float:
        """The farthest a value may be from the plain batch's; 0 where every bit is the same."""
        return max((pipeline.apart for pipeline in self.pipelines.batched), default=0.0)

    # -- getting ready ----------------------------------------------------------------------------------------------

    def begin(self, iterator: Any) -> Any:
        """A new iterator over the loader, and with it an epoch: what stands in the data set's place, None where nothing may."""
        source = self._source(iterator)
        if self.copies is not None:
            depth, twins = self.copies
            thread, elsewhere = vars(iterator).get("_next_data"), iterator._num_workers or self.as_workers

            def may() -> bool:
                """What this process draws for a batch it draws in the plain order."""
                return thread.works if isinstance(thread, Ahead) else bool(elsewhere)

            iterator._next_data = CopiesAhead(iterator, depth, twins, may, self._goes_to)
        return source

    def _source(self, iterator: Any) -> Any:
        if not iterator._auto_collation or self._left_alone:
            self._say_refusal()
            return None
        self.prepare()
        if is_stream(self.dataset):
            if self.following is None:
                return None
            self._stream = Stream(self.following, self._plain_collate)
            return StreamSource(self.dataset, self.boxes, None)
        self._thread = threading.get_ident()
        if self.ahead and iterator._num_workers == 0:
            iterator._next_data = Ahead(iterator, self.ahead, partial(self._say, "order"), own_generators(self.dataset))
        return Source(self.dataset, self.__getitems__, WorkerStreams(self.as_workers, iterator._base_seed, self.dataset) if self.as_workers else None)

    def prepare(self) -> None:
        """Read the data set's pipelines as they are now."""
        if self.keep is not None and self.keeps_nothing:
            self._say("keep", self.keeps_nothing)
        if self.refusal:
            self._say_refusal()
        if self.refusal or not (self.batched or self._keeps):
            self.following = None
            self._close_samples()
            return
        self._own = own_generators(self.dataset)
        with untouched(self._own):
            try:
                self._read()
            except Unknown as why:
                self._refuse(str(why))
            except Exception as error:
                self._refuse(f"its samples could not be looked at ({named(error)})")

    @property
    def _keeps(self) -> Keep | None:
        return self.keep if not self.keeps_nothing else None

    def _read(self) -> None:
        default = torch.get_default_device()
        if default.type != "cpu":
            raise Unknown(f"tensors are made on {default} by default (torch.set_default_device), and random numbers of the data set may be drawn there")
        before = self.following
        if self.samples is not None and self.samples.contents is not None and self.samples.contents.changed(thoroughly=True):
            self._keep_nothing(CHANGED)
        elif self.pipelines.changed:
            self._close_samples()
        self.following = following = self._learned()
        if self.batched and not following.pipelines.batched and following.why_none:
            self._say("batched", following.why_none)
            if self._keeps is None:
                raise Unknown(following.why_none)
        if self._keeps is None:
            return
        try:
            if self.samples is not None and (before is None or not before.pipelines.same_as(following.pipelines)):
                self._close_samples()
            self._open_samples(self._keeps, following)
        except Unknown as why:
            if not self.batched:
                raise
            self._keep_nothing(f"samples are fetched each time: {why}")
            self._read()

    def _learned(self) -> Following:
        reading = Reading(self.batched, self.light, self._keeps is not None, self._own)
        return learned(self.dataset, self._plain_collate, reading, partial(self._say, "batched"))

    def _open_samples(self, keep: Keep, following: Following) -> None:
        if self.samples is None:
            self.samples = opened(self.dataset, keep, following.pipelines, self._workers, self._own, raw=not self.batched)
        self.samples.pipelines = following.pipelines
        if keep.ahead:
            self.samples.fill_all()
        self.samples.remember()
        if self.resident is not None:
            if self._plain_collate is not default_collate:
                raise Unknown("the script has a collate function of its own, so its batches are not made on the device")
            store = self.samples.store
            if store.rows < len(self.dataset) or not can_be_gathered(following.pipelines, store):
                raise Unknown("not all of it can lie on the device: some samples do not fit, or some transforms need them one by one")
            if not self.resident.beside:
                store.move_to(self.resident.device)

    # -- batches ----------------------------------------------------------------------------------------------------

    def collate(self, batch: Any) -> Any:
        """What is left to do for the loader's collation: nothing, but for the samples of a stream."""
        return batch if self._stream is None else self._stream.collated(batch)

    def boxes(self, dataset: Any) -> Any:
        """The samples of a stream."""
        self._begin_in_worker()
        if self._stream is None and self.following is not None:
            self._stream = Stream(self.following, self._plain_collate)
        return self._stream.boxes(dataset) if self._stream is not None else iter(dataset)

    def try_out(self) -> str:
        """Make a small batch both ways; why not, where they are not the same. The random generators stay as they are."""
        if not is_stream(self.dataset) and hasattr(self.dataset, "__len__"):
            with untouched(self._own):
                if not self.refusal and self._is_fed:
                    self._first(spread(len(self.dataset), PROBED))
        return self.refusal

    def __getitems__(self, indices: Sequence[Any]) -> Any:
        """The finished batch of these samples."""
        self._begin_in_worker()
        if self.refusal or not self._is_fed:
            return self._plain(indices)
        if self.pipelines.changed:
            self._pause("the script changes its transforms while batches are made")
            return self._plain(indices)
        if self._checked_by != os.getpid():
            self._checked_by = os.getpid()
            return self._first(indices)
        # Where kept samples are only gathered nothing else can draw than what is done to the batch.
        before = torch.get_rng_state() if self._gathers else states(self._own)
        try:
            return self._made(indices, self.dataset)
        except Exception as error:
            if self._thread and threading.get_ident() != self._thread:
                raise  # generators are not moved beside the script; it is made again there
            why = str(error) if isinstance(error, Unknown) else f"a batch could not be made ({named(error)})"
        torch.set_rng_state(before) if isinstance(before, Tensor) else put_back(before)
        self._refuse(why)
        return self._plain(indices)  # if it is the data's own fault, it shows again, as if nothing had been before

    @property
    def _is_fed(self) -> bool:
        return self.samples is not None or (self.following is not None and self.following.may_follow)

    @property
    def _gathers(self) -> bool:
        """Whether every sample is kept, with nothing left to do for one by itself, and torch's own collation makes the batch."""
        if self.samples is None or self._plain_collate is not default_collate:
            return False
        return self.samples.store.full and can_be_gathered(self.pipelines, self.samples.store)

    def _plain(self, indices: Sequence[Any]) -> Any:
        return self._plain_collate(fetched(self.dataset, indices))

    def _first(self, indices: Sequence[Any]) -> Any:
        """The plain batch; the other is made of it too, and must be the same, down to where the random generators end."""
        self._own = own_generators(self.dataset)
        if self.samples is not None:
            self.samples.own = self._own
            if torch.utils.data.get_worker_info() is not None and self._init and self.samples.has_changed:
                self._keep_nothing("samples are not kept: the script's worker_init_fn may change the data set")
        start = states(self._own)
        batch = self._plain(indices)
        end = states(self._own)
        if self.samples is not None:  # by its own code
            self.samples.remember()
        why = self._different(batch, indices, start, end)
        if why and self.samples is not None and self.batched:
            put_back(start)
            self._keep_nothing(f"samples are not kept: {why}")
            with untouched(self._own):
                self.following = self._learned()
            why = self._different(batch, indices, start, end)
        put_back(end)
        if why:
            self._refuse(why)
        elif self.samples is not None:
            self.samples.remember()
        return batch

    def _different(self, batch: Any, indices: Sequence[Any], start: Any, end: Any) -> str:
        """In what a batch that is made here differs from the plain one, with which the random generators went from ``start`` to ``end``."""
        following, why = self.following, ""
        for at_once in dict.fromkeys((following is not None and following.at_once, True)):
            put_back(start)
            try:
                if following is not None:
                    following.at_once = at_once
                why = different(batch, self._made(indices, aside(self.dataset)), self.apart)  # fetching has done to the data set what it does
                why = why or ("" if same_states(end, states(self._own)) else "random numbers would be drawn in another order")
            except Exception as error:
                why = f"its first batch could not be made ({named(error)})"
            if not why or not self.pipelines.batched:
                break
        return why

    def _made(self, indices: Sequence[Any], dataset: Any) -> Any:
        rows = None
        if self.samples is not None:
            try:
                rows = self.samples.rows(indices, dataset)
            except Unknown as why:
                self._keep_nothing(str(why))
        samples, following = self.samples, self.following
        if rows is not None and samples is not None and self._gathers:
            make = partial(gathered, self.pipelines, samples.store, rows)
            batch = self.resident.made(make) if self.resident is not None else make()
        elif following is None:
            return self._plain_collate(fetched(dataset, indices))
        elif rows is not None and samples is not None:
            held = samples.store.samples(rows)
            batch = following.batch(lambda recorder: [replayed(each, self.pipelines, recorder) for each in held], self._plain_collate, len(indices))
        else:
            batch = following.batch(lambda recorder: fetched(dataset, indices), self._plain_collate, len(indices))
        if samples is not None:
            samples.after_batch()
        return batch

    def _begin_in_worker(self) -> None:
        """In a process that was started from nothing, at first: read the pipelines again, which must be those of the script's process."""
        if self._signature is None:
            return
        signature, self._signature = self._signature, None
        self._own = own_generators(self.dataset)
        if self._ledger_type is not None:
            INTERCEPTION.hold(self._ledger_type())
        with untouched(self._own):
            try:
                self.following = self._learned()
            except Exception as error:
                self._refuse(f"its samples could not be looked at in a worker ({named(error)})")
                return
        if self.samples is not None and not self.samples.pipelines_are(signature, self.following.pipelines):
            self._keep_nothing("samples are not kept: a worker finds other transforms in the data set")

    # -- what is given up -------------------------------------------------------------------------------------------

    def _close_samples(self) -> None:
        if self.samples is not None:
            self.samples.close()
        self.samples = None

    def _keep_nothing(self, why: str) -> None:
        self._close_samples()
        self.keep, self.keeps_nothing = None, why
        self._say("keep", why)

    def _pause(self, why: str) -> None:
        """Until the next epoch."""
        self._close_samples()
        self.following = None
        self._say("keep", why)
        self._say("batched", why)

    def _refuse(self, why: str) -> None:
        self._close_samples()
        self.refusal, self.following = why, None
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


def named(error: Exception) -> str:
    """In one line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def tried(loaders: Iterable[Any], wish: Callable[[Feed], None], ledger: Any) -> tuple[list[Feed], str]:
    """A feed for each of these DataLoaders, with the wishes that ``wish`` gives it, tried out; and why, where none of them can be fed.

    ``ledger`` is one of its own: at the end everything is as it was.
    """
    INTERCEPTION.hold(ledger)
    try:
        feeds = [_tried(loader, wish) for loader in loaders]
    finally:
        ledger.restore()
    if not feeds:
        return [], "the script prepares its batches itself, without a DataLoader"
    return feeds, feeds[0].useless if all(feed.useless for feed in feeds) else ""


def _tried(loader: Any, wish: Callable[[Feed], None]) -> Feed:
    feed = Feed(loader)
    wish(feed)
    feed.prepare()
    feed.try_out()
    return feed
