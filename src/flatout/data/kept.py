"""Kept samples: images before any random transform, and the calls that remain.

A kept sample is a tuple: the sample with a `CallResult` for each image, the source images, and the calls in the
order of the data set's code. Replaying it makes these calls again, so every random number is drawn in the
plain order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flatout.data.deferred import deferred, is_deferred, materialize
from flatout.data.deferring import Deferring
from flatout.data.finishing import DeferredWork
from flatout.data.images import form_of, shape_of
from flatout.data.intercept import Plain, recording
from flatout.data.lowering import name_of
from flatout.data.operation import ImageShape, NotBatchable
from flatout.data.pipelines import Pipelines, TransformPipeline
from flatout.data.store import Constant, mapped


class CallResult(Constant):
    """Stands in a kept sample for the result of a call."""


@dataclass(frozen=True)
class ReplayProgram(Constant):
    """The calls of one sample: the number of a pipeline, and the source or earlier call that it starts from.

    Earlier calls count from -1 downwards.
    """

    calls: tuple[tuple[int, int], ...] = ()


class UnreadResult:
    """Stands for the result of an unread transform while its sample is kept. It can only be passed on."""

    __slots__ = ("pipeline", "turn")

    def __init__(self, pipeline: TransformPipeline, turn: int) -> None:
        self.pipeline = pipeline
        self.turn = turn


class SampleRecorder:
    """The recorder of one sample to keep. It draws nothing and returns images that no code may access."""

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines
        self._sources: list[Any] = []
        self._known: dict[tuple[int, ...], int] = {}  # an image and its completed steps -> its source
        self._alive: list[Any] = []  # so that no id is reused
        self._calls: list[tuple[int, int]] = []
        self._why_not = ""

    def call(self, transform: object, image: object, plain: Plain) -> Any:
        parent, turn = _made_by(image)
        pipeline = self._pipelines.of(parent, transform)
        if pipeline is None:
            if parent is not None:
                self._why_not = (
                    f"{type(transform).__name__} accesses an image that is computed only with its batch"
                )
            with recording(None):
                return plain(transform, image)
        with recording(None):
            return self._left(pipeline, -1 - turn) if parent is not None else self._begun(pipeline, image)

    @property
    def answered(self) -> bool:
        """Return whether any call returned an image that no code may access."""
        return bool(self._calls)

    def reseeded(self) -> None:
        self._why_not = "the data set seeds torch's random generator itself"

    def look(self, image: object) -> None:
        """Record that the sample depends on an image whose random numbers are drawn with its batch."""
        work: DeferredWork = vars(image)["pending"]
        self._why_not = f"the data set looks at the images that {work.pipeline.name} returns"
        value = work.pixels
        for step in work.pipeline.steps[work.pipeline.kept :]:
            value = step(value)
        materialize(image, value)

    def stack(self, images: Sequence[Any]) -> Tensor | None:
        for image in images:
            if is_deferred(image):
                self.look(image)
        return None

    def sample(self, sample: object) -> tuple[Any, tuple[Any, ...], ReplayProgram]:
        """Return the sample in its kept form. Raises NotBatchable if it cannot be kept."""
        if self._why_not:
            raise NotBatchable(self._why_not)
        results = 0

        def kept(value: object) -> Any:
            nonlocal results
            pipeline, turn = _made_by(value)
            results += pipeline is not None
            return value if pipeline is None else CallResult(turn)

        structure = mapped(sample, kept)
        if not results and self._calls:
            raise NotBatchable("the data set uses the results of its transforms in another way")
        return structure, tuple(self._sources), ReplayProgram(calls=tuple(self._calls))

    def _begun(self, pipeline: TransformPipeline, image: object) -> Any:
        lowered = pipeline.lowered
        key = id(image), *map(id, pipeline.steps[: pipeline.kept])
        if key not in self._known:
            self._alive.append(image)
            for step in pipeline.steps[: pipeline.kept]:
                image = step(image)
            if lowered is not None and pipeline.kept == pipeline.start and form_of(image) != lowered.entry:
                self._why_not = "an image differs in kind from those that its pipeline was read with"
            if all(map(_reads_pixels_alone, pipeline.steps[pipeline.kept :])):
                image = _bare(image)
            self._known[key] = len(self._sources)
            self._sources.append(image)
        return self._left(pipeline, self._known[key])

    def _left(self, pipeline: TransformPipeline, start: int) -> Any:
        """Return the object that the data set's code gets for a remaining call."""
        turn = len(self._calls)
        self._calls.append((pipeline.number, start))
        if pipeline.lowered is None or pipeline.kept < pipeline.start:
            return UnreadResult(pipeline, turn)
        source = self._sources[self._root(start)]
        shape = shape_of(source)
        out: ImageShape | None = shape
        for link in pipeline.line:
            out = link.out(out) if out is not None else None
        if out is None:
            self._why_not = f"torchvision rejects an image of {tuple(shape)}"
            return UnreadResult(pipeline, turn)
        return deferred(DeferredWork(self, pipeline, source, shape, out, (), turn))

    def _root(self, start: int) -> int:
        while start < 0:
            start = self._calls[-1 - start][1]
        return start


def _made_by(value: object) -> tuple[TransformPipeline | None, int]:
    """Return the pipeline and index of the remaining call behind a value; None for every other value."""
    if type(value) is UnreadResult:
        return value.pipeline, value.turn
    if is_deferred(value):
        work: DeferredWork = vars(value)["pending"]
        return work.pipeline, work.turn
    return None, 0


def _reads_pixels_alone(step: object) -> bool:
    """Return whether a step is a torchvision transform that runs no function of the program."""
    inner = getattr(step, "transforms", ())
    return name_of(step)[3:] not in ("", "Lambda") and all(
        map(_reads_pixels_alone, inner if isinstance(inner, (list, tuple)) else ())
    )


def _bare(image: Any) -> Any:
    """Return a PIL image without the metadata of its file."""
    if hasattr(image, "getbands") and "transparency" not in image.info:
        image = image.copy()
        image.info = {}
    return image


def replayed(
    kept: tuple[Any, tuple[Any, ...], ReplayProgram], pipelines: Pipelines, recorder: Deferring
) -> Any:
    """Rebuild a kept sample by making its calls again."""
    structure, sources, program = kept
    results: list[Any] = []
    with recording(None):
        for number, start in program.calls:
            pipeline = pipelines.found[number]
            image, done = (sources[start], pipeline.kept) if start >= 0 else (results[-1 - start], 0)
            results.append(recorder.resume(pipeline, image, done))
    return mapped(structure, lambda value: results[value.number] if type(value) is CallResult else value)
