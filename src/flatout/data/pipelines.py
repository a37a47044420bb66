"""The pipelines of a data set: the transforms of an image, and which of them run on batches."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from flatout.data.changes import TransformState
from flatout.data.deferred import collate_deferred, tensor_class
from flatout.data.images import form_of, shape_of, stack
from flatout.data.journal import CallDraws, numbers_of
from flatout.data.lowering import CONTAINERS, LARGE, Lowered, flatten, name_of
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, shape_after
from flatout.data.streams import same_states, states

# Intercepts calls of transforms in a program's code and passes them to the recorder of the calling thread.
#
# While a lever needs it, the transform classes of torchvision get another ``__call__``. So do those of
# albumentations and kornia, if the program has imported them. It does the same as the original, unless this
# thread has a recorder.

OriginalCall = Callable[[Any, Any], Any]
"""The call of a transform without a recorder: ``original(transform, image) -> image``."""


class Recorder(Protocol):
    def call(self, transform: object, image: object, original: OriginalCall) -> Any:
        """The result that the program gets instead of ``original(transform, image)``."""

    def before_seeding(self) -> None:
        """Called before the program sets torch's CPU generator."""


class _Thread(threading.local):
    recorder: Recorder | None = None


THREAD = _Thread()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Pass calls in this thread to this recorder, or to none."""
    before, THREAD.recorder = THREAD.recorder, recorder
    try:
        yield
    finally:
        THREAD.recorder = before


class KeywordTransform:
    """An albumentations transform as a function of an image: it takes ``image=`` and returns a dictionary."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, image: object) -> Any:
        return self.transform(image=image)["image"]


def as_step(transform: Callable[..., Any]) -> Callable[..., Any]:
    """The transform as a function of one image."""
    return KeywordTransform(transform) if package_of(transform) == "albumentations" else transform


def package_of(transform: object) -> str:
    return type(transform).__module__.partition(".")[0]


class _Interception:
    """The intercepted classes. Each lever that needs them enables this; the last release restores them."""

    def __init__(self) -> None:
        self._holders = 0
        self._patches: Any = None
        self.ledger_type: Any = None  # for spawned workers
        self._classes: set[type] = set()

    def enable(self, ledger: Any) -> None:
        """Intercept calls until ``ledger`` is restored."""
        if self._patches is None:
            self.ledger_type = type(ledger)
            self._patches = self.ledger_type()
            self._observe_seeding()
        self._holders += 1
        ledger.on_restore("transforms intercepted", self._release)
        self.add_classes()

    def add_classes(self) -> None:
        """Add the classes of libraries that the program has imported since."""
        if self._patches is None:
            return
        new = [kind for kind in _classes() if kind not in self._classes]
        originals = {
            kind: kind.__call__ for kind in new
        }  # read all before changing any: one may inherit from another
        for kind in new:
            wrap = _by_keyword if kind.__module__.startswith("albumentations") else _by_position
            self._patches.set(kind, "__call__", wrap(kind, originals[kind]))
        self._classes.update(new)
        tv_tensors = sys.modules.get("torchvision.tv_tensors")
        for real in (Tensor, *((tv_tensors.Image,) if tv_tensors else ())):
            if tensor_class(real) not in default_collate_fn_map:
                self._patches.set_item(default_collate_fn_map, tensor_class(real), collate_deferred)

    def _observe_seeding(self) -> None:
        for name in ("manual_seed", "seed", "set_rng_state"):
            seeding = _wrap_seeding(getattr(torch, name))
            for module in (torch, torch.random):
                self._patches.set(module, name, seeding)

    def _release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            patches, self._patches = self._patches, None
            self._classes.clear()
            patches.restore()


INTERCEPTION = _Interception()


def _classes() -> list[type]:
    classes: list[type] = []
    for module, is_transform in (
        ("torchvision.transforms.transforms", _is_v1),
        ("torchvision.transforms.v2", _is_module),
        ("albumentations.core.composition", _is_albumentations),
        ("kornia.augmentation", _is_module),
    ):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        classes += [
            value
            for name, value in names.items()
            if isinstance(value, type)
            and not name.startswith("_")
            and is_transform(value, module.partition(".")[0])
        ]
    return list(dict.fromkeys(classes))


def _is_v1(kind: type, package: str) -> bool:
    return kind.__module__ == "torchvision.transforms.transforms" and any(
        "__call__" in vars(base) for base in kind.__mro__
    )


def _is_module(kind: type, package: str) -> bool:
    return issubclass(kind, torch.nn.Module) and kind.__module__.startswith(package + ".")


def _is_albumentations(kind: type, package: str) -> bool:
    return kind.__name__ == "Compose"


def _wrap_seeding(seeding: Callable[..., Any]) -> Any:
    @wraps(seeding)
    def wrapper(*args: object, **kwargs: object) -> Any:
        if THREAD.recorder is not None:
            THREAD.recorder.before_seeding()
        return seeding(*args, **kwargs)

    return wrapper


def _by_position(kind: type, original: Callable[..., Any]) -> Any:
    @wraps(original)
    def __call__(transform: object, *args: Any, **kwargs: Any) -> Any:
        recorder = THREAD.recorder
        if recorder is None or kwargs or len(args) != 1 or type(transform) is not kind:
            return original(transform, *args, **kwargs)
        return recorder.call(transform, args[0], original)

    return __call__


def _by_keyword(kind: type, original: Callable[..., Any]) -> Any:
    def call_original(transform: object, image: object) -> Any:
        return original(transform, image=image)["image"]

    @wraps(original)
    def __call__(transform: object, *args: Any, **kwargs: Any) -> Any:
        recorder = THREAD.recorder
        if recorder is None or args or kwargs.keys() != {"image"} or type(transform) is not kind:
            return original(transform, *args, **kwargs)
        return {"image": recorder.call(transform, kwargs["image"], call_original)}

    return __call__


MAX_SHAPES = 4096  # most image shapes that are cached
MAX_TRANSFORMS = 64  # most transforms followed per data set


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
    disabled: bool = False
    single_count: int = 0  # images computed one by one, because the program accessed them
    batched_count: int = 0  # images computed in batches
    _out_shapes: dict[ImageShape, ImageShape | None] = field(default_factory=dict)
    # of PIL images: type, mode and size
    _call_shapes: dict[Any, tuple[ImageShape, ImageShape] | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lowered, parent_lowered = self.lowered, self.parent.lowered if self.parent is not None else None
        self.call_operations: tuple[BatchOperation, ...] = (
            lowered.operations[len(parent_lowered.operations) if parent_lowered is not None else 0 :]
            if lowered is not None
            else ()
        )
        self.draws = any(operation.draws(LARGE) != () for operation in self.call_operations)
        self.empty_numbers: list[Sequence[Any]] = [[] for _ in self.call_operations]
        self.call_steps = self.steps[len(self.parent.steps) if self.parent is not None else 0 :]

    @property
    def chain(self) -> list[TransformPipeline]:
        """The calls that an image went through, this one last."""
        return [*(self.parent.chain if self.parent is not None else ()), self]

    @property
    def name(self) -> str:
        """The class name of the called transform."""
        return type(self.transform).__name__

    @property
    def tolerance(self) -> float:
        """The largest allowed difference from the plain pipeline; 0 means the same bits."""
        return self.lowered.tolerance if self.lowered is not None else 0.0

    def reset_counts(self) -> None:
        """Reset the counts of its images."""
        self.single_count = self.batched_count = 0
        self.proved = False

    def out_shape(self, shape: ImageShape) -> ImageShape | None:
        """The shape after this call's operations, or None if torchvision would reject the image."""
        if shape not in self._out_shapes:
            _limit_size(self._out_shapes)
            try:
                self._out_shapes[shape] = shape_after(self.call_operations, shape)
            except (ValueError, NotBatchable):
                self._out_shapes[shape] = None
        return self._out_shapes[shape]

    def call_shapes(self, image: Any) -> tuple[ImageShape, ImageShape] | None:
        """A first call's image shapes before and after, or None if torchvision must handle it."""
        key = (type(image), image.mode, image.size) if hasattr(image, "getbands") else None
        if key in self._call_shapes:
            return self._call_shapes[key]
        shapes = None
        if self.lowered is not None and form_of(image) == self.lowered.entry:
            shape = shape_of(image)
            out_shape = self.out_shape(shape)
            shapes = (shape, out_shape) if out_shape is not None else None
        if key is not None:
            _limit_size(self._call_shapes)
            self._call_shapes[key] = shapes
        return shapes


def _limit_size(cache: dict[Any, Any]) -> None:
    if len(cache) >= MAX_SHAPES:
        cache.clear()


class Pipelines:
    """Pipelines by the called transform and its input."""

    def __init__(self) -> None:
        self.entries: list[TransformPipeline] = []
        self.fully_kept: list[TransformState] = []  # of transforms whose results are kept unchanged
        self._by_call: dict[tuple[int, int], TransformPipeline] = {}
        self._known: dict[int, Any] = {}  # transforms that were read or failed; held so that no id is reused

    def __iter__(self) -> Iterator[TransformPipeline]:
        return iter(self.entries)

    def __bool__(self) -> bool:
        return any(not pipeline.disabled for pipeline in self.entries)

    def add(self, pipeline: TransformPipeline) -> None:
        self.entries.append(pipeline)
        self._by_call[id(pipeline.parent), id(pipeline.transform)] = pipeline

    def of(self, parent: TransformPipeline | None, transform: object) -> TransformPipeline | None:
        """The pipeline of this transform on a plain image, or on a deferred result of ``parent``."""
        pipeline = self._by_call.get((id(parent), id(transform)))
        return None if pipeline is None or pipeline.disabled else pipeline

    def mark_known(self, transform: object) -> None:
        self._known[id(transform)] = transform

    def is_new(self, transform: object) -> bool:
        """Whether the transform is new and may still be read."""
        return id(transform) not in self._known and len(self._known) < MAX_TRANSFORMS

    @property
    def too_many(self) -> bool:
        """Whether there are too many transforms, usually because each sample recreates them."""
        return len(self._known) >= MAX_TRANSFORMS

    @property
    def batched(self) -> list[TransformPipeline]:
        """The pipelines whose images are computed in batches."""
        return [
            pipeline for pipeline in self.entries if pipeline.lowered is not None and not pipeline.disabled
        ]

    @property
    def changed(self) -> bool:
        """Whether the program has changed a transform since it was read."""
        return any(
            pipeline.parameters.changed() for pipeline in self.entries if not pipeline.disabled
        ) or any(state.changed() for state in self.fully_kept)

    def same_as(self, other: Pipelines) -> bool:
        """Whether both were read from the same transforms with the same result."""
        calls = [
            [(id(pipeline.transform), pipeline.disabled) for pipeline in pipelines.entries]
            for pipelines in (self, other)
        ]
        return calls[0] == calls[1] and self.signature() == other.signature()

    def signature(self) -> list[tuple[Any, ...]]:
        """A signature that is equal in all processes that read the same pipelines."""
        return [
            (
                pipeline.parent.number if pipeline.parent is not None else None,
                pipeline.kept,
                pipeline.start,
                *map(_kind, pipeline.steps),
            )
            for pipeline in self.entries
        ]


def _kind(step: object) -> str:
    return f"{type(step).__module__}.{type(step).__qualname__}"


def steps_of(transform: object) -> tuple[Any, ...]:
    """The functions that a transform applies to an image, in order."""
    return tuple(as_step(step) for step in flatten(transform))


def parameters_of(transform: object, read: Sequence[Any]) -> TransformState:
    """What must not change: the read steps, and the lists that hold them."""
    return TransformState(read, _containers(transform))


def _containers(transform: Any) -> list[Any]:
    if type(transform) is torch.nn.Sequential:
        containers, inner = [vars(transform)["_modules"]], transform
    elif name_of(transform) in CONTAINERS:
        containers, inner = [vars(transform), transform.transforms], transform.transforms
    else:
        return []
    return [*containers, *(container for step in inner for container in _containers(step))]


@dataclass(slots=True, eq=False)
class DeferredWork:
    """One image with pending operations.

    ``pixels`` is a tensor, an array, or the bytes of a PIL image. ``shape`` is its shape, ``out_shape`` the
    result's.
    """

    recorder: Any
    pipeline: TransformPipeline
    pixels: Any
    shape: ImageShape
    out_shape: ImageShape
    draws: tuple[CallDraws, ...]
    call_index: int = 0  # index of the call within its sample
    used: bool = False  # whether it entered a batch or was accessed
    form: ImageForm = field(init=False)
    metadata_known: bool = field(init=False)

    def __post_init__(self) -> None:
        lowered = lowered_of(self.pipeline)
        self.form = lowered.exit
        self.metadata_known = not lowered.tail


def batch_of(works: Sequence[DeferredWork]) -> Tensor | None:
    """The images [B, C, H, W] if all works share pipeline and shape without single-image steps."""
    first = works[0]
    if lowered_of(first.pipeline).tail or any(
        work.pipeline is not first.pipeline or work.shape != first.shape for work in works
    ):
        return None
    return _run(works)


def rows_of(works: Sequence[DeferredWork]) -> list[Any]:
    """The images [C, H, W] in the order of the works. They may share the memory of a batch."""
    groups: dict[tuple[int, ImageShape], list[int]] = {}
    for number, work in enumerate(works):
        groups.setdefault((work.pipeline.number, work.shape), []).append(number)
    rows: list[Any] = [None] * len(works)
    for members in groups.values():
        group = [works[number] for number in members]
        for number, row in zip(members, apply_tail(lowered_of(group[0].pipeline), _run(group)), strict=True):
            rows[number] = row
    return rows


def _run(works: Sequence[DeferredWork]) -> Tensor:
    numbers = [
        columns
        for call_draws in zip(*(work.draws for work in works), strict=True)
        for columns in numbers_of(call_draws)
    ]
    return lowered_of(works[0].pipeline).run(stack([work.pixels for work in works], works[0].shape), numbers)


def apply_tail(lowered: Lowered, batch: Tensor) -> list[Any]:
    """The rows of a batch after the single-image steps that follow the operations."""
    rows: list[Any] = list(batch.unbind())
    if not lowered.tail:
        return rows
    before = states()
    with recording(None):
        for step in lowered.tail:
            rows = [step(row) for row in rows]
    if not same_states(before, states()):
        raise NotBatchable("a transform after the batched ones draws random numbers")
    return rows


def lowered_of(pipeline: TransformPipeline) -> Lowered:
    if pipeline.lowered is None:
        raise LookupError(f"the steps of {pipeline.name} run on single images")
    return pipeline.lowered


def finished_image(work: DeferredWork, row: Tensor) -> Any:
    """The image as in a plain run, with its own memory. Raises NotBatchable if it is not a tensor."""
    if work.form.kind == "pil":
        from PIL import Image

        pixels = row[0] if len(row) == 1 and work.form.mode == "L" else row.permute(1, 2, 0)
        return Image.fromarray(pixels.contiguous().numpy())
    if not isinstance(row, Tensor):
        raise NotBatchable(f"a transform of {work.pipeline.name} now returns a {type(row).__name__}")
    plain = row.as_subclass(Tensor)
    return (
        plain.permute(1, 2, 0).clone(memory_format=torch.contiguous_format).permute(2, 0, 1)
        if work.pipeline.permuted
        else plain.clone()
    )
