"""The pipelines of one data set as far as they are known, and the batches that are made with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset

from flatout.pipeline.deferring import Deferring
from flatout.pipeline.inspection import aside
from flatout.pipeline.intercept import INTERCEPTION, recording
from flatout.pipeline.keeping import spread
from flatout.pipeline.observing import InPlace, Observer, Reading
from flatout.pipeline.operation import Unknown
from flatout.pipeline.pipelines import Pipeline, Pipelines
from flatout.pipeline.source import fetched, is_stream
from flatout.pipeline.streams import put_back, states, untouched

PROBED = 3  # samples from all over the data set that pipelines are read with
MOST_PARTS = 8  # of a ConcatDataset that are looked at from the start
ROUNDS = 32  # in which pipelines prove themselves; each one but the last turns one off
MOST_ALONE = 8  # images that are computed one by one before a pipeline is left alone
NO_CALLS = "fetching a sample calls no transform object of torchvision; functional calls are not followed"
NOT_IMPORTED = "the program has not imported torchvision's transforms"
MADE_AGAIN = "the data set makes its transforms again for each sample, so they cannot be followed"


class Following:
    """``say`` is told why something is not done to batches; ``late``: transforms that are first called in a later batch are read as well."""

    def __init__(self, reading: Reading, say: Callable[[str], None], late: bool) -> None:
        self.pipelines = Pipelines()
        self.at_once = False  # numbers are drawn as each transform is called, where something else draws between two samples
        self.why_none = ""  # why no pipeline is done to batches
        self._reading = reading
        self._say = say
        self._late = late
        self._observer = self._new_observer()

    @property
    def own(self) -> Sequence[Any]:
        return self._reading.own

    def _new_observer(self) -> Observer | None:
        return Observer(self.own, on_copies=False) if self._late else None

    @property
    def may_follow(self) -> bool:
        """Whether there are pipelines, or there may be some yet."""
        return bool(self.pipelines) or self._observer is not None

    # -- learning ---------------------------------------------------------------------------------------------------

    def probe(self, fetch: Callable[[], Any], collate: Callable[[Any], Any]) -> None:
        """Read the pipelines of a few samples, which ``fetch`` takes from a data set that may be looked at. Moves random generators.

        Raises InPlace where to look at a sample is to change it.
        """
        observer = Observer(self.own, on_copies=True)
        with recording(observer):
            _tried(collate, fetch())
        reasons = self._reading.add(self.pipelines, observer.calls)
        self._prove(fetch, collate, reasons)
        if not self.pipelines.batched:
            self.why_none = reasons[-1] if reasons else _why_none()
        else:
            for reason in reasons:
                self._say(reason)

    def _prove(self, fetch: Callable[[], Any], collate: Callable[[Any], Any], reasons: list[str]) -> None:
        """Turn off the pipelines whose images are not simply handed on into a batch."""
        for _ in range(ROUNDS):
            if not self.pipelines.batched:
                return
            recorder = Deferring(self.pipelines, at_once=True, count=PROBED)
            with recording(recorder):
                samples = fetch()
                recorder.collating = True
                _tried(collate, samples)
                lost = recorder.close()
            found = [pipeline for pipeline in self.pipelines.batched if pipeline.alone]
            for pipeline in {*lost, *found}:
                _turn_off(pipeline, reasons)
            if not lost and not found:
                break
        if not recorder.calls:
            reasons.append(MADE_AGAIN)
            for pipeline in self.pipelines.batched:
                pipeline.off = True
        for pipeline in self.pipelines:
            pipeline.alone = pipeline.together = 0

    def learn_first(self, observer: Observer) -> None:
        """As `learn`, from the first batch: also where it showed nothing."""
        self.learn(observer)
        if not observer.calls:
            self._say(_why_none())

    def learn(self, observer: Observer) -> None:
        """Read the transforms whose plain calls were observed."""
        if not observer.calls:
            return
        with untouched(self.own):
            try:
                reasons = self._reading.add(self.pipelines, observer.calls)
            except InPlace as why:
                reasons = [str(why)]
        for reason in reasons:
            self._say(reason)

    # -- batches ----------------------------------------------------------------------------------------------------

    def batch(self, samples_of: Callable[[Deferring], Any], collate: Callable[[Any], Any], count: int) -> Any:
        """The batch of these ``count`` samples. Where it turns out that it cannot be made so, it is made again from the same random numbers."""
        for _ in range(ROUNDS):
            before = states(self.own)
            recorder = self.recorder(count)
            with recording(recorder):
                samples = samples_of(recorder)
                if recorder.settle():
                    recorder.collating = True
                    batch = collate(samples)
                    del samples
                    lost = recorder.close()
                    if recorder.settle() and not lost:
                        self.review()
                        return batch
                    self.turn_off(lost)
                    batch = None
            samples = None
            self.at_once = self.at_once or not recorder.settle()
            put_back(before)
        raise Unknown("its images are used in a way that cannot be followed")

    def recorder(self, count: int = 8) -> Deferring:
        """Of one batch."""
        return Deferring(self.pipelines, self.at_once, count, self._observer)

    def review(self) -> None:
        """After a batch: leave alone what gains nothing, and read what was called for the first time."""
        for pipeline in self.pipelines.batched:
            if pipeline.alone >= MOST_ALONE and pipeline.alone > pipeline.together:
                self.turn_off([pipeline])
        if self._observer is not None and self._observer.calls:
            self.learn(self._observer)
            self._observer = None if self.pipelines.overrun else self._new_observer()

    def turn_off(self, pipelines: Sequence[Pipeline]) -> None:
        reasons: list[str] = []
        for pipeline in pipelines:
            _turn_off(pipeline, reasons)
        for reason in reasons:
            self._say(reason)


def learned(dataset: Any, collate: Callable[[Any], Any], reading: Reading, say: Callable[[str], None]) -> Following:
    """The pipelines of a data set, from a few samples where samples can be fetched twice. Moves random generators."""
    INTERCEPTION.renew()
    following = Following(reading, say, late=reading.batched and not reading.keeping)
    if not is_stream(dataset) and hasattr(dataset, "__len__"):
        copy, indices = aside(dataset), spread(len(dataset), PROBED)
        if isinstance(dataset, ConcatDataset):
            indices = sorted({*indices, *dataset.cumulative_sizes[:MOST_PARTS], 0} - {len(dataset)})
        following.probe(lambda: fetched(copy, indices), collate)
    return following


def _turn_off(pipeline: Pipeline, reasons: list[str]) -> None:
    pipeline.off = True
    if pipeline.alone:
        reasons.append(f"the program looks at the images that {pipeline.name} returns before their batch is made, so they are made one by one")
    else:
        reasons.append(f"not all images that {pipeline.name} returns come into a batch, so they are made one by one")


def _tried(collate: Callable[[Any], Any], samples: Any) -> None:
    """Collate a few samples, to see what collation does to them. It may expect more of them."""
    try:
        collate(samples)
    except Exception:
        pass


def _why_none() -> str:
    return NO_CALLS if "torchvision.transforms" in sys.modules else NOT_IMPORTED
