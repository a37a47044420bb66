"""The recorder that defers images until their batch is made.

A call of a transform with a known pipeline draws its random numbers and returns a deferred image. Stacked
images are computed as a batch. An image that is accessed is computed alone; during collation, with all images
still deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from flatout.data.deferred import CLASSES, deferred_image, is_deferred, materialize
from flatout.data.journal import CallDraws, DrawJournal
from flatout.data.operation import ImageShape
from flatout.data.pipelines import (
    THREAD,
    DeferredWork,
    OriginalCall,
    Pipelines,
    Recorder,
    TransformPipeline,
    batch_of,
    finished_image,
    recording,
    rows_of,
)

MAX_PIXEL_BYTES = 2**28  # of deferred images; beyond this, they are computed before their batch is complete


class BatchRecorder:
    """One batch of about ``batch_size`` samples. ``observer`` receives transforms that were never read."""

    def __init__(
        self, pipelines: Pipelines, draw_now: bool, batch_size: int = 8, observer: Recorder | None = None
    ) -> None:
        self._pipelines = pipelines
        self._observer = observer
        self._batch_size = max(2, batch_size)
        self._journal = DrawJournal(draw_now)
        self._deferred: list[tuple[ref[Any], DeferredWork]] = []
        self._pipelines_of_batch: set[TransformPipeline] = set()
        self._lost_pipelines: set[TransformPipeline] = set()
        self._pixel_bytes = 0
        self.collating = False
        self.calls = 0  # number of deferred calls

    # -- calls

    def call(self, transform: object, image: object, original: OriginalCall) -> Any:
        work: DeferredWork | None = vars(image)["pending"] if type(image) in CLASSES else None
        pipeline = self._pipelines.of(work.pipeline if work is not None else None, transform)
        if pipeline is not None and pipeline.lowered is not None and (work is None or work.recorder is self):
            THREAD.recorder = None  # as `recording` does, at a third of the cost
            try:
                return self.resume(pipeline, image, 0)
            finally:
                THREAD.recorder = self
        if work is not None:
            work.recorder.on_access(image)
        if self._observer is not None and self._pipelines.is_new(transform):
            return self._observer.call(transform, image, original)
        with recording(None):
            return original(transform, image)

    def resume(self, pipeline: TransformPipeline, image: object, done_steps: int) -> Any:
        """A call's result for an image after ``done_steps`` steps: deferred if possible, otherwise real."""
        steps = pipeline.call_steps[done_steps:]
        if pipeline.parent is not None and type(image) in CLASSES:
            if pipeline.lowered is not None:
                return self._defer_again(pipeline, image)
            self.on_access(image)
        elif pipeline.lowered is not None:
            for step in pipeline.steps[done_steps : pipeline.start]:
                image = step(image)
            shapes = pipeline.call_shapes(image)
            if shapes is not None:
                return self._defer(
                    DeferredWork(
                        self, pipeline, self._copy_pixels(image), *shapes, (self._draws(pipeline, shapes[0]),)
                    )
                )
            steps = pipeline.steps[pipeline.start :]  # torchvision then rejects the image in the same place
        for step in steps:
            image = step(image)
        return image

    def _defer_again(self, pipeline: TransformPipeline, image: object) -> Any:
        before: DeferredWork = vars(image)["pending"]
        out_shape = pipeline.out_shape(before.out_shape)
        if out_shape is None:
            self.on_access(image)
            for step in pipeline.call_steps:
                image = step(image)
            return image
        before.used = True
        return self._defer(
            DeferredWork(
                self,
                pipeline,
                before.pixels,
                before.shape,
                out_shape,
                (*before.draws, self._draws(pipeline, before.out_shape)),
            )
        )

    def _draws(self, pipeline: TransformPipeline, shape: ImageShape) -> CallDraws:
        if pipeline.draws:
            return self._journal.add(pipeline.call_operations, shape)
        draws = CallDraws(pipeline.call_operations, shape)
        draws.shared_columns = pipeline.empty_numbers
        return draws

    def _defer(self, work: DeferredWork) -> Any:
        self.calls += 1
        image = deferred_image(work) if work.pipeline.proved else self._deferred_with_data(work)
        self._deferred.append((ref(image), work))
        if self._pixel_bytes > MAX_PIXEL_BYTES:
            self._compute_pending()
        return image

    def _copy_pixels(self, image: Any) -> Any:
        if isinstance(image, Tensor):
            pixels: Any = image.as_subclass(Tensor).clone()
            self._pixel_bytes += pixels.numel() * pixels.itemsize
            return pixels
        pixels = image.tobytes() if hasattr(image, "getbands") else image.copy()
        self._pixel_bytes += len(pixels) if type(pixels) is bytes else pixels.nbytes
        return pixels

    def _deferred_with_data(self, work: DeferredWork) -> Any:
        """A deferred image with data: before its pipeline is proved, no code may get an empty one."""
        image = deferred_image(work)
        if isinstance(image, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                image.data = self._values([work])[0]
        return image

    def before_seeding(self) -> None:
        """Draw all earlier numbers now: the program sets torch's generator."""
        self._journal.interrupt()

    # -- computing deferred images

    def on_access(self, image: object) -> None:
        """Turn a deferred image into the real one, because the program accesses it."""
        work: DeferredWork = vars(image)["pending"]
        pending = self._pending() if self.collating else []
        if len(pending) < 2:
            work.pipeline.single_count += 1
            self._compute([(image, work)])
        else:
            self._compute_batch(pending)

    def stack(self, images: Sequence[Any]) -> Tensor | None:
        """The result of torch.stack on these images."""
        works: list[DeferredWork] = [image.pending for image in images]
        self._journal.draw_pending()
        with recording(None):
            batch = batch_of(works)
            if batch is None:
                batch = torch.stack([row.as_subclass(Tensor) for row in rows_of(works)])
        for work in works:
            work.used = True
            work.pipeline.batched_count += self.collating or len(works) >= self._batch_size
            # for example, a few views of one sample
            work.pipeline.single_count += not self.collating and len(works) < self._batch_size
        return batch

    def draw_pending(self) -> bool:
        """Draw the remaining numbers. Return whether all numbers equal those of a plain run."""
        self._journal.draw_pending()
        return self._journal.in_order

    def close(self) -> list[TransformPipeline]:
        """Compute the images that the program still holds. Return the pipelines of lost images.

        No deferred image leaves the batch. An image is lost if it was deleted without entering a batch or
        being accessed through torch: the program may hold a copy of it. Pipelines without a lost image are
        proved.
        """
        self._compute_pending()
        for pipeline in self._pipelines_of_batch - self._lost_pipelines:
            pipeline.proved = True
        return list(self._lost_pipelines)

    def _pending(self) -> list[tuple[Any, DeferredWork]]:
        pairs = [(reference(), work) for reference, work in self._deferred]
        return [(image, work) for image, work in pairs if image is not None and is_deferred(image)]

    def _compute_pending(self) -> None:
        self._compute_batch(self._pending())
        self._pipelines_of_batch.update(work.pipeline for _, work in self._deferred)
        self._lost_pipelines.update(work.pipeline for _, work in self._deferred if not work.used)
        self._deferred.clear()
        self._pixel_bytes = 0

    def _compute_batch(self, pairs: Sequence[tuple[Any, DeferredWork]]) -> None:
        for _, work in pairs:
            work.pipeline.batched_count += work.form.kind != "pil"
            work.pipeline.single_count += work.form.kind == "pil"  # no gain for PIL images
        self._compute(pairs)

    def _compute(self, pairs: Sequence[tuple[Any, DeferredWork]]) -> None:
        for (image, work), value in zip(pairs, self._values([work for _, work in pairs]), strict=True):
            work.used = True
            materialize(image, value)

    def _values(self, works: Sequence[DeferredWork]) -> list[Any]:
        if not works:
            return []
        self._journal.draw_pending()
        with recording(None):
            return [finished_image(work, row) for work, row in zip(works, rows_of(works), strict=True)]
