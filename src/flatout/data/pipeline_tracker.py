"""The known pipelines of one data set, and the batches made with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import ConcatDataset

from flatout.data.deferring import Deferring
from flatout.data.inspection import inspection_copy
from flatout.data.intercept import INTERCEPTION, recording
from flatout.data.observing import CallObserver, InPlaceTransform, PipelineReader
from flatout.data.operation import NotBatchable
from flatout.data.pipelines import Pipelines, TransformPipeline
from flatout.data.source import fetched, spread
from flatout.data.streams import preserve_states, restore_states, states

if TYPE_CHECKING:
    from torch.utils.data import Dataset

PROBED = 3  # samples, spread over the data set, used to read pipelines
MOST_PARTS = 8  # parts of a ConcatDataset that are inspected at the start
ROUNDS = 32  # to prove pipelines; each round except the last disables one
MOST_ALONE = 8  # images computed one by one before a pipeline is disabled
NO_CALLS = "fetching a sample calls no transform object of torchvision; functional calls are not followed"
NOT_IMPORTED = "the program has not imported torchvision's transforms"
MADE_AGAIN = "the data set recreates its transforms for each sample, so they cannot be followed"


class PipelineTracker:
    """``say`` receives the reasons why a transform is not batched.

    With ``late``, transforms that are first called in later batches are read too.
    """

    def __init__(self, reading: PipelineReader, say: Callable[[str], None], late: bool) -> None:
        self.pipelines = Pipelines()
        self.at_once = False  # draw at each call, because something else draws between samples
        self.why_none = ""  # why no pipeline runs on batches
        self._reading = reading
        self._say = say
        self._late = late
        self._observer = self._new_observer()

    @property
    def own(self) -> Sequence[Any]:
        return self._reading.own

    def _new_observer(self) -> CallObserver | None:
        return CallObserver(self.own, on_copies=False) if self._late else None

    @property
    def may_follow(self) -> bool:
        """Return whether there are pipelines, or may be some later."""
        return bool(self.pipelines) or self._observer is not None

    # -- learning -------------------------------------------------------------------------------------------

    def probe(self, fetch: Callable[[], Any], collate: Callable[[Any], Any]) -> None:
        """Read the pipelines of a few samples. Moves random generators.

        ``fetch`` takes the samples from a copy of the data set. Raises InPlace if inspecting a sample changes
        it.
        """
        observer = CallObserver(self.own, on_copies=True)
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
        """Disable the pipelines whose images do not all go directly into a batch."""
        for _ in range(ROUNDS):
            if not self.pipelines.batched:
                return
            recorder = Deferring(self.pipelines, at_once=True, count=PROBED)
            with recording(recorder):
                samples = fetch()
                recorder.collating = True
                _tried(collate, samples)
                lost = recorder.close()
            accessed = [pipeline for pipeline in self.pipelines.batched if pipeline.alone]
            for pipeline in {*lost, *accessed}:
                _turn_off(pipeline, reasons)
            if not lost and not accessed:
                break
        if not recorder.calls:
            reasons.append(MADE_AGAIN)
            for pipeline in self.pipelines.batched:
                pipeline.off = True
        for pipeline in self.pipelines:
            pipeline.alone = pipeline.together = 0

    def learn(self, observer: CallObserver) -> None:
        """Read the transforms of the observed plain calls."""
        if not observer.calls:
            return
        with preserve_states(self.own):
            try:
                reasons = self._reading.add(self.pipelines, observer.calls)
            except InPlaceTransform as why:
                reasons = [str(why)]
        for reason in reasons:
            self._say(reason)

    # -- batches --------------------------------------------------------------------------------------------

    def batch(self, samples_of: Callable[[Deferring], Any], collate: Callable[[Any], Any], count: int) -> Any:
        """Return the batch of these ``count`` samples. A retry uses the same random numbers."""
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
            restore_states(before)
        raise NotBatchable("its images are used in a way that flatout cannot follow")

    def recorder(self, count: int = 8) -> Deferring:
        """Return the recorder of one batch."""
        return Deferring(self.pipelines, self.at_once, count, self._observer)

    def review(self) -> None:
        """After a batch, disable pipelines without a gain, and read transforms called for the first time."""
        for pipeline in self.pipelines.batched:
            if pipeline.alone >= MOST_ALONE and pipeline.alone > pipeline.together:
                self.turn_off([pipeline])
        if self._observer is not None and self._observer.calls:
            self.learn(self._observer)
            self._observer = None if self.pipelines.overrun else self._new_observer()

    def turn_off(self, pipelines: Sequence[TransformPipeline]) -> None:
        reasons: list[str] = []
        for pipeline in pipelines:
            _turn_off(pipeline, reasons)
        for reason in reasons:
            self._say(reason)


def learned(
    dataset: Dataset, collate: Callable[[Any], Any], reading: PipelineReader, say: Callable[[str], None]
) -> PipelineTracker:
    """Learn the pipelines of a data set, from a few samples if possible. Moves random generators."""
    INTERCEPTION.renew()
    following = PipelineTracker(reading, say, late=reading.batched and not reading.keeping)
    if hasattr(dataset, "__len__"):
        copy, indices = inspection_copy(dataset), spread(len(dataset), PROBED)
        if isinstance(dataset, ConcatDataset):
            indices = sorted({*indices, *dataset.cumulative_sizes[:MOST_PARTS], 0} - {len(dataset)})
        following.probe(lambda: fetched(copy, indices), collate)
    return following


def _turn_off(pipeline: TransformPipeline, reasons: list[str]) -> None:
    pipeline.off = True
    if pipeline.alone:
        reasons.append(
            f"the program looks at the images that {pipeline.name} returns before their batch is made, so they are computed one by one"
        )
    else:
        reasons.append(
            f"not all images that {pipeline.name} returns enter a batch, so they are computed one by one"
        )


def _tried(collate: Callable[[Any], Any], samples: object) -> None:
    """Collate a few samples to observe collation. Errors are ignored: it may need more samples."""
    try:
        collate(samples)
    except Exception:
        pass


def _why_none() -> str:
    return NO_CALLS if "torchvision.transforms" in sys.modules else NOT_IMPORTED
