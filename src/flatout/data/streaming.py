"""Batches of an IterableDataset.

It cannot be fetched twice, so its pipelines are read from the plain calls of the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from flatout.data.deferring import Deferring
from flatout.data.intercept import recording
from flatout.data.observing import CallObserver
from flatout.data.pipeline_tracker import PipelineTracker
from flatout.data.source import StreamSample

if TYPE_CHECKING:
    from torch.utils.data import Dataset


class StreamFeed:
    """Samples in boxes, and their collation. Each transform draws when called: no retry is possible."""

    def __init__(self, following: PipelineTracker, collate: Callable[[Any], Any]) -> None:
        self._following = following
        self._collate = collate
        self._recorder: Deferring | CallObserver | None = None  # of the current batch
        self._started = False
        following.at_once = True

    def boxes(self, dataset: Dataset) -> Iterator[StreamSample]:
        samples = iter(dataset)
        while True:
            with recording(self._recorder_now()):
                try:
                    sample = next(samples)
                except StopIteration:
                    return
            yield StreamSample(sample)

    def collated(self, boxes: list[StreamSample]) -> Any:
        recorder = self._recorder_now()
        self._recorder = None
        samples = [box.take() for box in boxes]
        with recording(recorder):
            if isinstance(recorder, Deferring):
                recorder.collating = True
            batch = self._collate(samples)
            del samples
            if isinstance(recorder, Deferring):
                self._following.turn_off(recorder.close())
                self._following.review()
            else:
                self._following.learn_first(recorder)
        return batch

    def _recorder_now(self) -> Deferring | CallObserver:
        if self._recorder is None:
            following = self._following
            self._recorder = (
                following.recorder() if self._started else CallObserver(following.own, on_copies=False)
            )
            self._started = True
        return self._recorder
