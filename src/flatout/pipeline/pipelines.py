"""The pipelines of a data set: which transforms an image goes through in one call or several, and how far they are done to whole batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flatout.pipeline.changes import Parameters
from flatout.pipeline.intercept import as_step
from flatout.pipeline.lowering import CONTAINERS, Lowered, flat, form_of, name_of, shape_of
from flatout.pipeline.operation import Operation, Shape, Unknown, shape_after

MOST_SHAPES = 4096  # of images that are remembered
MOST = 64  # transforms of one data set that are followed


@dataclass(eq=False)
class Pipeline:
    """A call of a transform, on an image as it is or on what the pipeline ``parent`` left to be computed.

    Of its ``steps``, those of the calls before included, ``kept`` come before samples are kept and ``start`` before the batch takes over.
    Without ``lowered`` all steps stay with the single image.
    """

    number: int
    parent: Pipeline | None
    transform: Any
    steps: tuple[Any, ...]
    kept: int
    start: int
    lowered: Lowered | None
    parameters: Parameters  # of what was read, and of what kept samples came through
    permuted: bool = False  # its images have the channels last in memory
    proved: bool = False  # its images were seen on their way into a batch
    off: bool = False
    alone: int = 0  # images that were computed one by one, because the program looked at them
    together: int = 0  # images that were computed in batches
    _out: dict[Shape, Shape | None] = field(default_factory=dict)
    _entering: dict[Any, tuple[Shape, Shape] | None] = field(default_factory=dict)  # of PIL images: type, mode and size

    def __post_init__(self) -> None:
        mine, before = self.lowered, self.parent.lowered if self.parent is not None else None
        self.own: tuple[Operation, ...] = mine.operations[len(before.operations) if before is not None else 0:] if mine is not None else ()
        self.draws = any(operation.draws(LARGE) != () for operation in self.own)
        self.no_draws: list[Sequence[Any]] = [[] for _ in self.own]
        self.own_steps = self.steps[len(self.parent.steps) if self.parent is not None else 0:]

    @property
    def line(self) -> list[Pipeline]:
        """The calls that an image has gone through, this one at the end."""
        return [*(self.parent.line if self.parent is not None else ()), self]

    @property
    def name(self) -> str:
        """Of the transform that is called."""
        return type(self.transform).__name__

    @property
    def apart(self) -> float:
        """The farthest a value may be from the plain pipeline's; 0 where every bit is the same."""
        return self.lowered.apart if self.lowered is not None else 0.0

    def forget(self) -> None:
        """What became of its images so far."""
        self.alone = self.together = 0
        self.proved = False

    def out(self, shape: Shape) -> Shape | None:
        """Of what this call's operations make of such an image; None where torchvision would reject it."""
        if shape not in self._out:
            _bound(self._out)
            try:
                self._out[shape] = shape_after(self.own, shape)
            except (ValueError, Unknown):
                self._out[shape] = None
        return self._out[shape]

    def entering(self, image: Any) -> tuple[Shape, Shape] | None:
        """The shape of an image that the batch takes over from a first call, and that of the result; None where it is left to torchvision."""
        key = (type(image), image.mode, image.size) if hasattr(image, "getbands") else None
        if key in self._entering:
            return self._entering[key]
        found = None
        if self.lowered is not None and form_of(image) == self.lowered.entry:
            shape = shape_of(image)
            out = self.out(shape)
            found = (shape, out) if out is not None else None
        if key is not None:
            _bound(self._entering)
            self._entering[key] = found
        return found


def _bound(remembered: dict[Any, Any]) -> None:
    if len(remembered) >= MOST_SHAPES:
        remembered.clear()


LARGE = Shape(3, 2**14, 2**14)  # whatever draws only where there is room draws here


class Pipelines:
    """Pipelines by the transform that is called and by what it is called on."""

    def __init__(self) -> None:
        self.found: list[Pipeline] = []
        self.finished: list[Parameters] = []  # of transforms whose results are kept as they come out
        self._by_call: dict[tuple[int, int], Pipeline] = {}
        self._met: dict[int, Any] = {}  # transforms that were read, or could not be; held, so that no identity is given away again

    def __iter__(self) -> Iterator[Pipeline]:
        return iter(self.found)

    def __bool__(self) -> bool:
        """Whether any is still followed."""
        return any(not pipeline.off for pipeline in self.found)

    def add(self, pipeline: Pipeline) -> None:
        self.found.append(pipeline)
        self._by_call[id(pipeline.parent), id(pipeline.transform)] = pipeline

    def of(self, parent: Pipeline | None, transform: Any) -> Pipeline | None:
        """The one that is followed when this transform is called on an image, or on what the pipeline ``parent`` left to be computed."""
        found = self._by_call.get((id(parent), id(transform)))
        return None if found is None or found.off else found

    def meet(self, transform: Any) -> None:
        self._met[id(transform)] = transform

    def is_new(self, transform: Any) -> bool:
        """Whether it was never looked at, and may be."""
        return id(transform) not in self._met and len(self._met) < MOST

    @property
    def overrun(self) -> bool:
        """Whether there are more transforms than are followed: a data set that makes them again for each sample, as a rule."""
        return len(self._met) >= MOST

    @property
    def batched(self) -> list[Pipeline]:
        """Those whose images are computed in batches."""
        return [pipeline for pipeline in self.found if pipeline.lowered is not None and not pipeline.off]

    @property
    def changed(self) -> bool:
        """Whether the program has changed a transform since it was read."""
        return any(pipeline.parameters.changed() for pipeline in self.found if not pipeline.off) or any(each.changed() for each in self.finished)

    def same_as(self, other: Pipelines) -> bool:
        """Whether both were read from the same transforms with the same result."""
        calls = [[(id(pipeline.transform), pipeline.off) for pipeline in each.found] for each in (self, other)]
        return calls[0] == calls[1] and self.signature() == other.signature()

    def signature(self) -> list[tuple[Any, ...]]:
        """What two processes have in common that have read the same pipelines."""
        return [(pipeline.parent.number if pipeline.parent is not None else None, pipeline.kept, pipeline.start, *map(_kind, pipeline.steps))
                for pipeline in self.found]


def _kind(step: Any) -> str:
    return f"{type(step).__module__}.{type(step).__qualname__}"


def steps_of(transform: Any) -> tuple[Any, ...]:
    """What it does to an image, one function after another."""
    return tuple(as_step(step) for step in flat(transform))


def parameters_of(transform: Any, read: Sequence[Any]) -> Parameters:
    """What must stay as it is: the steps that were read, and the lists that hold the steps."""
    return Parameters(read, _containers(transform))


def _containers(transform: Any) -> list[Any]:
    """What holds the steps of nested Compose and Sequential, each by itself."""
    if type(transform) is torch.nn.Sequential:
        return [vars(transform)["_modules"], *(found for inner in transform for found in _containers(inner))]
    if name_of(transform) in CONTAINERS:
        return [vars(transform), transform.transforms, *(found for inner in transform.transforms for found in _containers(inner))]
    return []
