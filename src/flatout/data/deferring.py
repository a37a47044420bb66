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

from flatout.data.deferred import CLASSES, deferred, is_deferred, materialize
from flatout.data.finishing import DeferredWork, batch_of, finished, rows_of
from flatout.data.intercept import HERE, Plain, Recorder, recording
from flatout.data.journal import CallDraws, DrawJournal
from flatout.data.operation import ImageShape
from flatout.data.pipelines import Pipelines, TransformPipeline

MOST_HELD_BYTES = 2**28  # of deferred images; beyond this, they are computed before their batch is complete


class Deferring:
    """One batch of about ``count`` samples. ``observer`` receives transforms that were never read."""

    def __init__(
        self, pipelines: Pipelines, at_once: bool, count: int = 8, observer: Recorder | None = None
    ) -> None:
        self._pipelines = pipelines
        self._observer = observer
        self._count = max(2, count)
        self._journal = DrawJournal(at_once)
        self._made: list[tuple[ref[Any], DeferredWork]] = []
        self._seen: set[TransformPipeline] = set()
        self._lost: set[TransformPipeline] = set()
        self._held_bytes = 0
        self.collating = False
        self.calls = 0  # number of deferred calls

    # -- calls ----------------------------------------------------------------------------------------------

    def call(self, transform: object, image: object, plain: Plain) -> Any:
        work: DeferredWork | None = vars(image)["pending"] if type(image) in CLASSES else None
        pipeline = self._pipelines.of(work.pipeline if work is not None else None, transform)
        if pipeline is not None and pipeline.lowered is not None and (work is None or work.recorder is self):
            HERE.recorder = None  # as `recording` does, at a third of the cost
            try:
                return self.resume(pipeline, image, 0)
            finally:
                HERE.recorder = self
        if work is not None:
            work.recorder.look(image)
        if self._observer is not None and self._pipelines.is_new(transform):
            return self._observer.call(transform, image, plain)
        with recording(None):
            return plain(transform, image)

    def resume(self, pipeline: TransformPipeline, image: object, done: int) -> Any:
        """Return a call's result for an image after ``done`` steps: deferred if possible, otherwise real."""
        steps = pipeline.own_steps[done:]
        if pipeline.parent is not None and type(image) in CLASSES:
            if pipeline.lowered is not None:
                return self._put_off_again(pipeline, image)
            self.look(image)
        elif pipeline.lowered is not None:
            for step in pipeline.steps[done : pipeline.start]:
                image = step(image)
            shapes = pipeline.entering(image)
            if shapes is not None:
                return self._answer(
                    DeferredWork(
                        self, pipeline, self._pixels(image), *shapes, (self._draws(pipeline, shapes[0]),)
                    )
                )
            steps = pipeline.steps[pipeline.start :]  # torchvision then rejects the image in the same place
        for step in steps:
            image = step(image)
        return image

    def _put_off_again(self, pipeline: TransformPipeline, image: object) -> Any:
        """Call a transform on an image that another call deferred."""
        before: DeferredWork = vars(image)["pending"]
        out = pipeline.out(before.out)
        if out is None:
            self.look(image)
            for step in pipeline.own_steps:
                image = step(image)
            return image
        before.used = True
        return self._answer(
            DeferredWork(
                self,
                pipeline,
                before.pixels,
                before.shape,
                out,
                (*before.draws, self._draws(pipeline, before.out)),
            )
        )

    def _draws(self, pipeline: TransformPipeline, shape: ImageShape) -> CallDraws:
        if pipeline.draws:
            return self._journal.add(pipeline.own, shape)
        draws = CallDraws(pipeline.own, shape)
        draws.block = pipeline.no_draws
        return draws

    def _answer(self, work: DeferredWork) -> Any:
        self.calls += 1
        answer = deferred(work) if work.pipeline.proved else self._shown(work)
        self._made.append((ref(answer), work))
        if self._held_bytes > MOST_HELD_BYTES:
            self._compute_alive()
        return answer

    def _pixels(self, image: Any) -> Any:
        """Copy the pixels: the program may write into its image after the call, or close its file."""
        if isinstance(image, Tensor):
            mine: Any = image.as_subclass(Tensor).clone()
            self._held_bytes += mine.numel() * mine.itemsize
            return mine
        mine = image.tobytes() if hasattr(image, "getbands") else image.copy()
        self._held_bytes += len(mine) if type(mine) is bytes else mine.nbytes
        return mine

    def _shown(self, work: DeferredWork) -> Any:
        """Return a deferred image with data: before its pipeline is proved, no code may get an empty one."""
        answer = deferred(work)
        if isinstance(answer, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                answer.data = self._values([work])[0]
        return answer

    def reseeded(self) -> None:
        """Draw all earlier numbers now: the program sets torch's generator."""
        self._journal.interrupt()

    # -- computing deferred images --------------------------------------------------------------------------

    def look(self, image: object) -> None:
        """Turn a deferred image into the real one, because the program accesses it."""
        work: DeferredWork = vars(image)["pending"]
        alive = self._alive() if self.collating else []
        if len(alive) < 2:
            work.pipeline.alone += 1
            self._compute([(image, work)])
        else:
            self._compute_together(alive)

    def stack(self, images: Sequence[Any]) -> Tensor | None:
        """Return the result of torch.stack on these images."""
        works: list[DeferredWork] = [image.pending for image in images]
        self._journal.settle()
        with recording(None):
            batch = batch_of(works)
            if batch is None:
                batch = torch.stack([row.as_subclass(Tensor) for row in rows_of(works)])
        for work in works:
            work.used = True
            work.pipeline.together += self.collating or len(works) >= self._count
            work.pipeline.alone += (
                not self.collating and len(works) < self._count
            )  # for example, a few views of one sample
        return batch

    def settle(self) -> bool:
        """Draw the remaining numbers. Return whether all numbers equal those of a plain run."""
        self._journal.settle()
        return self._journal.in_order

    def close(self) -> list[TransformPipeline]:
        """Compute the images that the program still holds. Return the pipelines of lost images.

        No deferred image leaves the batch. An image is lost if it was deleted without entering a batch or
        being accessed through torch: the program may hold a copy of it. Pipelines without a lost image are
        proved.
        """
        self._compute_alive()
        for pipeline in self._seen - self._lost:
            pipeline.proved = True
        return list(self._lost)

    def _alive(self) -> list[tuple[Any, DeferredWork]]:
        pairs = [(held(), work) for held, work in self._made]
        return [(image, work) for image, work in pairs if image is not None and is_deferred(image)]

    def _compute_alive(self) -> None:
        self._compute_together(self._alive())
        self._seen.update(work.pipeline for _, work in self._made)
        self._lost.update(work.pipeline for _, work in self._made if not work.used)
        self._made.clear()
        self._held_bytes = 0

    def _compute_together(self, pairs: Sequence[tuple[Any, DeferredWork]]) -> None:
        for _, work in pairs:
            work.pipeline.together += work.form.kind != "pil"
            work.pipeline.alone += work.form.kind == "pil"  # no gain for PIL images
        self._compute(pairs)

    def _compute(self, pairs: Sequence[tuple[Any, DeferredWork]]) -> None:
        for (image, work), value in zip(pairs, self._values([work for _, work in pairs]), strict=True):
            work.used = True
            materialize(image, value)

    def _values(self, works: Sequence[DeferredWork]) -> list[Any]:
        if not works:
            return []
        self._journal.settle()
        with recording(None):
            return [finished(work, row) for work, row in zip(works, rows_of(works), strict=True)]
