"""The pipelines of a data set: the transforms of an image, and which of them run on batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flatout.data.changes import TransformState
from flatout.data.images import form_of, shape_of
from flatout.data.intercept import as_step
from flatout.data.lowering import CONTAINERS, Lowered, flat, name_of
from flatout.data.operation import BatchOperation, ImageShape, NotBatchable, shape_after

MOST_SHAPES = 4096  # most image shapes that are cached
MOST = 64  # most transforms followed per data set


@dataclass(eq=False)
class TransformPipeline:
    """A transform call, on a plain image or on a deferred result of the pipeline ``parent``.

    ``steps`` includes the steps of earlier calls. ``kept`` of them run before samples are kept, and ``start``
    before the batch operations. Without ``lowered``, all steps run on single images.
    """

    number: int
    parent: TransformPipeline | None
    transform: Any
    steps: tuple[Any, ...]
    kept: int
    start: int
    lowered: Lowered | None
    parameters: TransformState  # of the read transforms, and of those that kept samples went through
    permuted: bool = False  # its images are channels-last in memory
    proved: bool = False  # its images were observed to enter a batch
    off: bool = False
    alone: int = 0  # images computed one by one, because the program accessed them
    together: int = 0  # images computed in batches
    _out: dict[ImageShape, ImageShape | None] = field(default_factory=dict)
    _entering: dict[Any, tuple[ImageShape, ImageShape] | None] = field(
        default_factory=dict
    )  # of PIL images: type, mode and size

    def __post_init__(self) -> None:
        mine, before = self.lowered, self.parent.lowered if self.parent is not None else None
        self.own: tuple[BatchOperation, ...] = (
            mine.operations[len(before.operations) if before is not None else 0 :] if mine is not None else ()
        )
        self.draws = any(operation.draws(LARGE) != () for operation in self.own)
        self.no_draws: list[Sequence[Any]] = [[] for _ in self.own]
        self.own_steps = self.steps[len(self.parent.steps) if self.parent is not None else 0 :]

    @property
    def line(self) -> list[TransformPipeline]:
        """Return the calls that an image went through, this one last."""
        return [*(self.parent.line if self.parent is not None else ()), self]

    @property
    def name(self) -> str:
        """Return the class name of the called transform."""
        return type(self.transform).__name__

    @property
    def apart(self) -> float:
        """Return the largest allowed difference from the plain pipeline; 0 means the same bits."""
        return self.lowered.apart if self.lowered is not None else 0.0

    def forget(self) -> None:
        """Reset the counts of its images."""
        self.alone = self.together = 0
        self.proved = False

    def out(self, shape: ImageShape) -> ImageShape | None:
        """Return the shape after this call's operations, or None if torchvision would reject the image."""
        if shape not in self._out:
            _bound(self._out)
            try:
                self._out[shape] = shape_after(self.own, shape)
            except (ValueError, NotBatchable):
                self._out[shape] = None
        return self._out[shape]

    def entering(self, image: Any) -> tuple[ImageShape, ImageShape] | None:
        """Return a first call's image shapes before and after, or None if torchvision must handle it."""
        key = (type(image), image.mode, image.size) if hasattr(image, "getbands") else None
        if key in self._entering:
            return self._entering[key]
        shapes = None
        if self.lowered is not None and form_of(image) == self.lowered.entry:
            shape = shape_of(image)
            out = self.out(shape)
            shapes = (shape, out) if out is not None else None
        if key is not None:
            _bound(self._entering)
            self._entering[key] = shapes
        return shapes


def _bound(remembered: dict[Any, Any]) -> None:
    if len(remembered) >= MOST_SHAPES:
        remembered.clear()


LARGE = ImageShape(3, 2**14, 2**14)  # large enough that every transform that can draw does draw


class Pipelines:
    """Pipelines by the called transform and its input."""

    def __init__(self) -> None:
        self.found: list[TransformPipeline] = []
        self.finished: list[TransformState] = []  # of transforms whose results are kept unchanged
        self._by_call: dict[tuple[int, int], TransformPipeline] = {}
        self._met: dict[int, Any] = {}  # transforms that were read or failed; held so that no id is reused

    def __iter__(self) -> Iterator[TransformPipeline]:
        return iter(self.found)

    def __bool__(self) -> bool:
        """Return whether any pipeline is still followed."""
        return any(not pipeline.off for pipeline in self.found)

    def add(self, pipeline: TransformPipeline) -> None:
        self.found.append(pipeline)
        self._by_call[id(pipeline.parent), id(pipeline.transform)] = pipeline

    def of(self, parent: TransformPipeline | None, transform: object) -> TransformPipeline | None:
        """Return the pipeline of this transform on a plain image, or on a deferred result of ``parent``."""
        pipeline = self._by_call.get((id(parent), id(transform)))
        return None if pipeline is None or pipeline.off else pipeline

    def meet(self, transform: object) -> None:
        self._met[id(transform)] = transform

    def is_new(self, transform: object) -> bool:
        """Return whether the transform is new and may still be read."""
        return id(transform) not in self._met and len(self._met) < MOST

    @property
    def overrun(self) -> bool:
        """Return whether there are too many transforms, usually because each sample recreates them."""
        return len(self._met) >= MOST

    @property
    def batched(self) -> list[TransformPipeline]:
        """Return the pipelines whose images are computed in batches."""
        return [pipeline for pipeline in self.found if pipeline.lowered is not None and not pipeline.off]

    @property
    def changed(self) -> bool:
        """Return whether the program has changed a transform since it was read."""
        return any(pipeline.parameters.changed() for pipeline in self.found if not pipeline.off) or any(
            state.changed() for state in self.finished
        )

    def same_as(self, other: Pipelines) -> bool:
        """Return whether both were read from the same transforms with the same result."""
        calls = [
            [(id(pipeline.transform), pipeline.off) for pipeline in pipelines.found]
            for pipelines in (self, other)
        ]
        return calls[0] == calls[1] and self.signature() == other.signature()

    def signature(self) -> list[tuple[Any, ...]]:
        """Return a signature that is equal in all processes that read the same pipelines."""
        return [
            (
                pipeline.parent.number if pipeline.parent is not None else None,
                pipeline.kept,
                pipeline.start,
                *map(_kind, pipeline.steps),
            )
            for pipeline in self.found
        ]


def _kind(step: object) -> str:
    return f"{type(step).__module__}.{type(step).__qualname__}"


def steps_of(transform: object) -> tuple[Any, ...]:
    """Return the functions that a transform applies to an image, in order."""
    return tuple(as_step(step) for step in flat(transform))


def parameters_of(transform: object, read: Sequence[Any]) -> TransformState:
    """Return what must not change: the read steps, and the lists that hold them."""
    return TransformState(read, _containers(transform))


def _containers(transform: Any) -> list[Any]:
    """Return the containers of the steps of nested Compose and Sequential."""
    if type(transform) is torch.nn.Sequential:
        return [
            vars(transform)["_modules"],
            *(container for inner in transform for container in _containers(inner)),
        ]
    if name_of(transform) in CONTAINERS:
        return [
            vars(transform),
            transform.transforms,
            *(container for inner in transform.transforms for container in _containers(inner)),
        ]
    return []
