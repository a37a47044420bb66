"""The known pipelines of one data set, and the batches made with them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import ConcatDataset, Dataset

from flatout.data.deferring import BatchRecorder
from flatout.data.inspection import inspection_copy
from flatout.data.observing import CallObserver, InPlaceTransform, PipelineReader
from flatout.data.operation import NotBatchable
from flatout.data.pipelines import INTERCEPTION, Pipelines, TransformPipeline, recording
from flatout.data.source import fetch_samples, spread
from flatout.data.streams import preserve_states, restore_states, states

PROBED_SAMPLES = 3  # samples, spread over the data set, used to read pipelines
MAX_PARTS = 8  # parts of a ConcatDataset that are inspected at the start
MAX_ROUNDS = 32  # to prove pipelines; each round except the last disables one
MAX_SINGLE_IMAGES = 8  # images computed one by one before a pipeline is disabled
NO_CALLS = "fetching a sample calls no transform object of torchvision; functional calls are not followed"
NOT_IMPORTED = "the program has not imported torchvision's transforms"
RECREATED = "the data set recreates its transforms for each sample, so they cannot be followed"


class PipelineTracker:
    """``report`` receives the reasons why a transform is not batched.

    With ``observes_batches``, transforms that are first called in later batches are read too.
    """

    def __init__(self, reader: PipelineReader, report: Callable[[str], None], observes_batches: bool) -> None:
        self.pipelines = Pipelines()
        self.draw_now = False  # draw at each call, because something else draws between samples
        self.why_none = ""  # why no pipeline runs on batches
        self._reader = reader
        self._report = report
        self._observes_batches = observes_batches
        self._observer = self._new_observer()

    @property
    def rngs(self) -> Sequence[Any]:
        return self._reader.rngs

    def _new_observer(self) -> CallObserver | None:
        return CallObserver(self.rngs, on_copies=False) if self._observes_batches else None

    @property
    def may_follow(self) -> bool:
        """Whether there are pipelines, or may be some later."""
        return bool(self.pipelines) or self._observer is not None

    # -- learning

    def probe(self, fetch: Callable[[], Any], collate: Callable[[Any], Any]) -> None:
        """Read the pipelines of a few samples. Moves random generators.

        ``fetch`` takes the samples from a copy of the data set. Raises InPlace if inspecting a sample changes
        it.
        """
        observer = CallObserver(self.rngs, on_copies=True)
        with recording(observer):
            _collate_quietly(collate, fetch())
        reasons = self._reader.add(self.pipelines, observer.calls)
        self._prove(fetch, collate, reasons)
        if not self.pipelines.batched:
            self.why_none = reasons[-1] if reasons else _why_none()
        else:
            for reason in reasons:
                self._report(reason)

    def _prove(self, fetch: Callable[[], Any], collate: Callable[[Any], Any], reasons: list[str]) -> None:
        for _ in range(MAX_ROUNDS):
            if not self.pipelines.batched:
                return
            recorder = BatchRecorder(self.pipelines, draw_now=True, batch_size=PROBED_SAMPLES)
            with recording(recorder):
                samples = fetch()
                recorder.collating = True
                _collate_quietly(collate, samples)
                lost = recorder.close()
            accessed = [pipeline for pipeline in self.pipelines.batched if pipeline.single_count]
            for pipeline in {*lost, *accessed}:
                _disable(pipeline, reasons)
            if not lost and not accessed:
                break
        if not recorder.calls:
            reasons.append(RECREATED)
            for pipeline in self.pipelines.batched:
                pipeline.disabled = True
        for pipeline in self.pipelines:
            pipeline.single_count = pipeline.batched_count = 0

    def read_calls(self, observer: CallObserver) -> None:
        """Read the transforms of the observed plain calls."""
        if not observer.calls:
            return
        with preserve_states(self.rngs):
            try:
                reasons = self._reader.add(self.pipelines, observer.calls)
            except InPlaceTransform as why:
                reasons = [str(why)]
        for reason in reasons:
            self._report(reason)

    # -- batches

    def batch(
        self, samples_of: Callable[[BatchRecorder], Any], collate: Callable[[Any], Any], batch_size: int
    ) -> Any:
        """The batch of these ``batch_size`` samples. A retry uses the same random numbers."""
        for _ in range(MAX_ROUNDS):
            before = states(self.rngs)
            recorder = self.recorder(batch_size)
            with recording(recorder):
                samples = samples_of(recorder)
                if recorder.draw_pending():
                    recorder.collating = True
                    batch = collate(samples)
                    del samples
                    lost = recorder.close()
                    if recorder.draw_pending() and not lost:
                        self.review()
                        return batch
                    self.disable(lost)
                    batch = None
            samples = None
            self.draw_now = self.draw_now or not recorder.draw_pending()
            restore_states(before)
        raise NotBatchable("its images are used in a way that flatout cannot follow")

    def recorder(self, batch_size: int = 8) -> BatchRecorder:
        return BatchRecorder(self.pipelines, self.draw_now, batch_size, self._observer)

    def review(self) -> None:
        """After a batch, disable pipelines without a gain, and read transforms called for the first time."""
        for pipeline in self.pipelines.batched:
            if pipeline.single_count >= MAX_SINGLE_IMAGES and pipeline.single_count > pipeline.batched_count:
                self.disable([pipeline])
        if self._observer is not None and self._observer.calls:
            self.read_calls(self._observer)
            self._observer = None if self.pipelines.too_many else self._new_observer()

    def disable(self, pipelines: Sequence[TransformPipeline]) -> None:
        reasons: list[str] = []
        for pipeline in pipelines:
            _disable(pipeline, reasons)
        for reason in reasons:
            self._report(reason)


def track_pipelines(
    dataset: Dataset, collate: Callable[[Any], Any], reader: PipelineReader, report: Callable[[str], None]
) -> PipelineTracker:
    """Learn the pipelines of a data set, from a few samples if possible. Moves random generators."""
    INTERCEPTION.add_classes()
    tracker = PipelineTracker(reader, report, observes_batches=reader.batched and not reader.keeping)
    if hasattr(dataset, "__len__"):
        copy, indices = inspection_copy(dataset), spread(len(dataset), PROBED_SAMPLES)
        if isinstance(dataset, ConcatDataset):
            indices = sorted({*indices, *dataset.cumulative_sizes[:MAX_PARTS], 0} - {len(dataset)})
        tracker.probe(lambda: fetch_samples(copy, indices), collate)
    return tracker


def _disable(pipeline: TransformPipeline, reasons: list[str]) -> None:
    pipeline.disabled = True
    if pipeline.single_count:
        reasons.append(
            f"the program looks at the images that {pipeline.name} returns before their batch is made, so they are computed one by one"
        )
    else:
        reasons.append(
            f"not all images that {pipeline.name} returns enter a batch, so they are computed one by one"
        )


def _collate_quietly(collate: Callable[[Any], Any], samples: object) -> None:
    """Collate a few samples to observe collation. Errors are ignored: it may need more samples."""
    try:
        collate(samples)
    except Exception:
        pass


def _why_none() -> str:
    return NO_CALLS if "torchvision.transforms" in sys.modules else NOT_IMPORTED
