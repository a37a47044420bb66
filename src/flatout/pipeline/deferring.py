"""The recorder that puts images off until their batch is made.

A call of a transform whose pipeline is known draws its random numbers and answers a deferred image. Images that are stacked are computed as a
batch. An image that is looked at is computed by itself; while a batch is collated, with all others that are still deferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from flatout.pipeline.deferred import CLASSES, become, deferred, is_deferred
from flatout.pipeline.finishing import Work, batch_of, finished, rows_of
from flatout.pipeline.intercept import HERE, Plain, Recorder, recording
from flatout.pipeline.journal import Draws, Journal
from flatout.pipeline.operation import Shape
from flatout.pipeline.pipelines import Pipeline, Pipelines

MOST_HELD_BYTES = 2**28  # of images that wait; more are computed before their batch is complete


class Deferring:
    """One batch of ``count`` samples, or about so many. ``observer`` is shown the transforms that were never read before."""

    def __init__(self, pipelines: Pipelines, at_once: bool, count: int = 8, observer: Recorder | None = None) -> None:
        self._pipelines = pipelines
        self._observer = observer
        self._count = max(2, count)
        self._journal = Journal(at_once)
        self._made: list[tuple[ref[Any], Work]] = []
        self._seen: set[Pipeline] = set()
        self._lost: set[Pipeline] = set()
        self._held_bytes = 0
        self.collating = False
        self.calls = 0  # that were put off

    # -- calls ------------------------------------------------------------------------------------------------------

    def call(self, transform: Any, image: Any, plain: Plain) -> Any:
        work: Work | None = vars(image)["pending"] if type(image) in CLASSES else None
        pipeline = self._pipelines.of(work.pipeline if work is not None else None, transform)
        if pipeline is not None and pipeline.lowered is not None and (work is None or work.recorder is self):
            HERE.recorder = None  # as `recording` does it, at a third of the price
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

    def resume(self, pipeline: Pipeline, image: Any, done: int) -> Any:
        """What a call answers for an image that has ``done`` steps behind it: a deferred image, or a real one where it cannot be put off."""
        steps = pipeline.own_steps[done:]
        if pipeline.parent is not None and type(image) in CLASSES:
            if pipeline.lowered is not None:
                return self._put_off_again(pipeline, image)
            self.look(image)
        elif pipeline.lowered is not None:
            for step in pipeline.steps[done:pipeline.start]:
                image = step(image)
            shapes = pipeline.entering(image)
            if shapes is not None:
                return self._answer(Work(self, pipeline, self._pixels(image), *shapes, (self._draws(pipeline, shapes[0]),)))
            steps = pipeline.steps[pipeline.start:]  # torchvision then rejects the image where it would have rejected it
        for step in steps:
            image = step(image)
        return image

    def _put_off_again(self, pipeline: Pipeline, image: Any) -> Any:
        """A call on what another call has put off."""
        before: Work = vars(image)["pending"]
        out = pipeline.out(before.out)
        if out is None:
            self.look(image)
            for step in pipeline.own_steps:
                image = step(image)
            return image
        before.used = True
        return self._answer(Work(self, pipeline, before.pixels, before.shape, out, (*before.draws, self._draws(pipeline, before.out))))

    def _draws(self, pipeline: Pipeline, shape: Shape) -> Draws:
        if pipeline.draws:
            return self._journal.add(pipeline.own, shape)
        draws = Draws(pipeline.own, shape)
        draws.block = pipeline.no_draws
        return draws

    def _answer(self, work: Work) -> Any:
        self.calls += 1
        answer = deferred(work) if work.pipeline.proved else self._shown(work)
        self._made.append((ref(answer), work))
        if self._held_bytes > MOST_HELD_BYTES:
            self._compute_alive()
        return answer

    def _pixels(self, image: Any) -> Any:
        """In memory of their own: the program may write into its image after the call, or close its file."""
        if isinstance(image, Tensor):
            mine: Any = image.as_subclass(Tensor).clone()
            self._held_bytes += mine.numel() * mine.itemsize
            return mine
        mine = image.tobytes() if hasattr(image, "getbands") else image.copy()
        self._held_bytes += len(mine) if type(mine) is bytes else mine.nbytes
        return mine

    def _shown(self, work: Work) -> Any:
        """A deferred image that holds its data already: until its pipeline has proved itself, nothing may see an empty tensor."""
        answer = deferred(work)
        if isinstance(answer, Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                answer.data = self._values([work])[0]
        return answer

    def reseeded(self) -> None:
        """The program sets torch's generator: what is drawn before must have been drawn."""
        self._journal.interrupt()

    # -- what becomes of deferred images ----------------------------------------------------------------------------

    def look(self, image: Any) -> None:
        """The program looks inside: from now on it is the real image."""
        work: Work = vars(image)["pending"]
        alive = self._alive() if self.collating else []
        if len(alive) < 2:
            work.pipeline.alone += 1
            self._compute([(image, work)])
        else:
            self._compute_together(alive)

    def stack(self, images: Sequence[Any]) -> Tensor | None:
        """What torch.stack makes of these."""
        works: list[Work] = [image.pending for image in images]
        self._journal.settle()
        with recording(None):
            batch = batch_of(works)
            if batch is None:
                batch = torch.stack([row.as_subclass(Tensor) for row in rows_of(works)])
        for work in works:
            work.used = True
            work.pipeline.together += self.collating or len(works) >= self._count
            work.pipeline.alone += not self.collating and len(works) < self._count  # a few views of one sample, say
        return batch

    def settle(self) -> bool:
        """Draw what is left to draw; whether all numbers are those that the images one by one would have drawn."""
        self._journal.settle()
        return self._journal.in_order

    def close(self) -> list[Pipeline]:
        """Compute what the program still holds, so that nothing deferred leaves the batch. Answers the pipelines of lost images.

        An image is lost that has gone without having come into a batch, or having been looked at through torch: the program may hold a copy of it.
        Pipelines without a lost image have proved themselves.
        """
        self._compute_alive()
        for pipeline in self._seen - self._lost:
            pipeline.proved = True
        return list(self._lost)

    def _alive(self) -> list[tuple[Any, Work]]:
        found = [(held(), work) for held, work in self._made]
        return [(image, work) for image, work in found if image is not None and is_deferred(image)]

    def _compute_alive(self) -> None:
        self._compute_together(self._alive())
        self._seen.update(work.pipeline for _, work in self._made)
        self._lost.update(work.pipeline for _, work in self._made if not work.used)
        self._made.clear()
        self._held_bytes = 0

    def _compute_together(self, pairs: Sequence[tuple[Any, Work]]) -> None:
        for _, work in pairs:
            work.pipeline.together += work.form.kind != "pil"
            work.pipeline.alone += work.form.kind == "pil"  # it gains nothing
        self._compute(pairs)

    def _compute(self, pairs: Sequence[tuple[Any, Work]]) -> None:
        for (image, work), value in zip(pairs, self._values([work for _, work in pairs]), strict=True):
            work.used = True
            become(image, value)

    def _values(self, works: Sequence[Work]) -> list[Any]:
        if not works:
            return []
        self._journal.settle()
        with recording(None):
            return [finished(work, row) for work, row in zip(works, rows_of(works), strict=True)]
