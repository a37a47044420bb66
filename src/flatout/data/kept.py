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

from flatout.data.deferred import deferred_image, is_deferred, materialize
from flatout.data.deferring import BatchRecorder
from flatout.data.finishing import DeferredWork
from flatout.data.images import form_of, shape_of
from flatout.data.intercept import OriginalCall, recording
from flatout.data.lowering import name_of
from flatout.data.operation import ImageShape, NotBatchable
from flatout.data.pipelines import Pipelines, TransformPipeline
from flatout.data.store import Constant, map_values


class CallResult(Constant):
    """Stands in a kept sample for the result of a call."""


@dataclass(frozen=True)
class ReplayProgram(Constant):
    """The calls of one sample: the number of a pipeline, and the source or earlier call that it starts from.

    Earlier calls count from -1 downwards.
    """

    calls: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, eq=False)
class UnreadResult:
    """Stands for the result of an unread transform while its sample is kept. It can only be passed on."""

    pipeline: TransformPipeline
    call_index: int


class SampleRecorder:
    """The recorder of one sample to keep. It draws nothing and returns images that no code may access."""

    def __init__(self, pipelines: Pipelines) -> None:
        self._pipelines = pipelines
        self._sources: list[Any] = []
        self._source_numbers: dict[
            tuple[int, ...], int
        ] = {}  # an image and its completed steps -> its source
        self._images: list[Any] = []  # so that no id is reused
        self._calls: list[tuple[int, int]] = []
        self._why_not = ""

    def call(self, transform: object, image: object, original: OriginalCall) -> Any:
        parent, call_index = _origin(image)
        pipeline = self._pipelines.of(parent, transform)
        if pipeline is None:
            if parent is not None:
                self._why_not = (
                    f"{type(transform).__name__} accesses an image that is computed only with its batch"
                )
            with recording(None):
                return original(transform, image)
        with recording(None):
            return (
                self._defer_call(pipeline, -1 - call_index)
                if parent is not None
                else self._start_call(pipeline, image)
            )

    @property
    def returned_placeholder(self) -> bool:
        """Whether any call returned an image that no code may access."""
        return bool(self._calls)

    def before_seeding(self) -> None:
        self._why_not = "the data set seeds torch's random generator itself"

    def on_access(self, image: object) -> None:
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
                self.on_access(image)
        return None

    def sample(self, sample: object) -> tuple[Any, tuple[Any, ...], ReplayProgram]:
        """The sample in its kept form. Raises NotBatchable if it cannot be kept."""
        if self._why_not:
            raise NotBatchable(self._why_not)
        results = 0

        def placeholder(value: object) -> Any:
            nonlocal results
            pipeline, call_index = _origin(value)
            results += pipeline is not None
            return value if pipeline is None else CallResult(call_index)

        structure = map_values(sample, placeholder)
        if not results and self._calls:
            raise NotBatchable("the data set uses the results of its transforms in another way")
        return structure, tuple(self._sources), ReplayProgram(calls=tuple(self._calls))

    def _start_call(self, pipeline: TransformPipeline, image: object) -> Any:
        lowered = pipeline.lowered
        key = id(image), *map(id, pipeline.steps[: pipeline.kept])
        if key not in self._source_numbers:
            self._images.append(image)
            for step in pipeline.steps[: pipeline.kept]:
                image = step(image)
            if lowered is not None and pipeline.kept == pipeline.start and form_of(image) != lowered.entry:
                self._why_not = "an image differs in kind from those that its pipeline was read with"
            if all(map(_reads_only_pixels, pipeline.steps[pipeline.kept :])):
                image = _without_metadata(image)
            self._source_numbers[key] = len(self._sources)
            self._sources.append(image)
        return self._defer_call(pipeline, self._source_numbers[key])

    def _defer_call(self, pipeline: TransformPipeline, start: int) -> Any:
        call_index = len(self._calls)
        self._calls.append((pipeline.number, start))
        if pipeline.lowered is None or pipeline.kept < pipeline.start:
            return UnreadResult(pipeline, call_index)
        source = self._sources[self._source_number(start)]
        shape = shape_of(source)
        out_shape: ImageShape | None = shape
        for link in pipeline.chain:
            out_shape = link.out_shape(out_shape) if out_shape is not None else None
        if out_shape is None:
            self._why_not = f"torchvision rejects an image of {tuple(shape)}"
            return UnreadResult(pipeline, call_index)
        return deferred_image(DeferredWork(self, pipeline, source, shape, out_shape, (), call_index))

    def _source_number(self, start: int) -> int:
        while start < 0:
            start = self._calls[-1 - start][1]
        return start


def _origin(value: object) -> tuple[TransformPipeline | None, int]:
    """The pipeline and index of the remaining call behind a value; None for every other value."""
    if type(value) is UnreadResult:
        return value.pipeline, value.call_index
    if is_deferred(value):
        work: DeferredWork = vars(value)["pending"]
        return work.pipeline, work.call_index
    return None, 0


def _reads_only_pixels(step: object) -> bool:
    inner = getattr(step, "transforms", ())
    return name_of(step)[3:] not in ("", "Lambda") and all(
        map(_reads_only_pixels, inner if isinstance(inner, (list, tuple)) else ())
    )


def _without_metadata(image: Any) -> Any:
    if hasattr(image, "getbands") and "transparency" not in image.info:
        image = image.copy()
        image.info = {}
    return image


def replay_sample(
    kept: tuple[Any, tuple[Any, ...], ReplayProgram], pipelines: Pipelines, recorder: BatchRecorder
) -> Any:
    """Rebuild a kept sample by making its calls again."""
    structure, sources, program = kept
    results: list[Any] = []
    with recording(None):
        for number, start in program.calls:
            pipeline = pipelines.entries[number]
            image, done_steps = (sources[start], pipeline.kept) if start >= 0 else (results[-1 - start], 0)
            results.append(recorder.resume(pipeline, image, done_steps))
    return map_values(structure, lambda value: results[value.number] if type(value) is CallResult else value)
