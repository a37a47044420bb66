"""Reads a pipeline of transforms: which run on whole batches, which run on single samples, and why.

    head | operations | tail      per sample, as a batch, per sample again

The longest run of known transforms becomes operations; of several equally long runs, the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flatout.data import color, readers, resample
from flatout.data.draws import matches_torch
from flatout.data.images import form_of, shape_of
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable
from flatout.data.operations import ToTensor, merge_adjacent
from flatout.data.streams import same_states, states

CONTAINERS = ("v1.Compose", "v2.Compose")
LARGE = ImageShape(3, 2**14, 2**14)  # large enough that every transform that can draw does draw


@dataclass(frozen=True)
class Lowered:
    """The first ``start`` transforms run before the operations, those from ``end`` on run after them.

    ``entry`` is the form of images before the operations, ``exit`` the form after them.
    """

    steps: tuple[Any, ...]
    start: int
    end: int
    operations: tuple[BatchOperation, ...]
    entry: ImageForm
    exit: ImageForm
    reasons: tuple[str, ...] = ()

    @property
    def tail(self) -> tuple[Any, ...]:
        return self.steps[self.end :]

    @property
    def tolerance(self) -> float:
        """The largest allowed difference from the plain pipeline; 0 means the same bits."""
        tolerance = 0.0
        for operation in self.operations:
            tolerance = tolerance * operation.gain + operation.tolerance
        return tolerance

    def run(self, images: Tensor, numbers: Sequence[Sequence[Any]]) -> Tensor:
        """Run the operations on images [B, C, H, W]. The result is contiguous."""
        # channels first, so that windows, flips and floats are long runs of memory
        images = images.contiguous()
        for operation, columns in zip(self.operations, numbers, strict=True):
            images = operation(images, columns)
        return images.contiguous()


def flatten(transform: Any) -> list[Any]:
    """The transforms of nested Compose and Sequential, in order."""
    if name_of(transform) in CONTAINERS:
        return [step for inner in transform.transforms for step in flatten(inner)]
    if type(transform) is torch.nn.Sequential:
        return [step for inner in transform for step in flatten(inner)]
    return [transform]


def name_of(transform: object) -> str:
    """A name such as ``v1.RandomCrop``, or "" if it is not torchvision's own transform."""
    kind = type(transform)
    module = kind.__module__
    if module.startswith("torchvision.transforms.v2."):
        return f"v2.{kind.__name__}"
    return f"v1.{kind.__name__}" if module == "torchvision.transforms.transforms" else ""


def read(transform: object, form: ImageForm) -> Sequence[BatchOperation]:
    """The operations of a transform. Raises NotBatchable with the reason."""
    name = name_of(transform)
    if name not in READERS:
        raise NotBatchable(f"{type(transform).__name__} is not a transform that can run on batches")
    if getattr(transform, "_forward_hooks", None) or getattr(transform, "_forward_pre_hooks", None):
        raise NotBatchable(f"{type(transform).__name__} has hooks")
    try:
        operations = READERS[name](transform, form)
    except NotBatchable as why:
        raise NotBatchable(f"{type(transform).__name__} runs on single images: {why}") from why
    except (AttributeError, TypeError, ValueError) as error:  # another torchvision
        raise NotBatchable(f"{type(transform).__name__} could not be read ({error})") from error
    operations = [operations] if isinstance(operations, BatchOperation) else list(operations)
    if form.kind == "numpy" and operations and not isinstance(operations[0], ToTensor):
        raise NotBatchable(f"{type(transform).__name__} does not change arrays")
    return operations


READERS = {**readers.READERS, **color.READERS, **resample.READERS}


def lower(transform: object, images: Sequence[Any], light: bool = False, unfinished: bool = False) -> Lowered:
    """Read a pipeline with a few input images. With ``light``, heavy transforms run on single images.

    With ``unfinished``, another transform call follows, so the last step may also return PIL images.
    Moves random generators. Raises NotBatchable with the reason if nothing can run on a batch.
    """
    if not matches_torch():
        raise NotBatchable("flatout does not know how this torch version draws random numbers")
    steps = flatten(transform)
    descriptions, draws_numbers = [_describe(images)], []
    for step in steps:
        before = states()
        images = [step(image) for image in images]
        descriptions.append(_describe(images))
        draws_numbers.append(not same_states(before, states()))
    best: Lowered | None = None
    reasons: dict[str, None] = {}
    for start in range(len(steps)):
        form, uniform = descriptions[start]
        if form is None or not uniform:
            continue
        if form.kind == "tensor" and any(getattr(step, "inplace", False) for step in steps[start:]):
            reasons["its transforms may change the images of the data set in place"] = None
            continue
        candidate = _longest_run(steps, start, form, light, reasons, unfinished)
        # it would draw only after all images have drawn for the operations
        if candidate is not None and any(draws_numbers[candidate.end :]):
            reasons[
                f"{type(steps[draws_numbers.index(True, candidate.end)]).__name__} draws random numbers after the transforms that could run on a batch"
            ] = None
            continue
        if (
            candidate is not None
            and (best is None or candidate.end - candidate.start >= best.end - best.start)
            and not (best and candidate.end == best.end)
        ):
            best = candidate
    if best is None:
        raise NotBatchable(
            next(reversed(reasons), "its images differ in size or kind, or their kind is unknown")
        )
    return best


def extend(before: Lowered, transform: object, light: bool = False) -> Lowered:
    """Append the transform of another call. Steps that cannot run on a batch follow the operations.

    Raises NotBatchable if these steps could not receive a single image.
    """
    steps, form, operations = flatten(transform), before.exit, list(before.operations)
    reasons: dict[str, None] = dict.fromkeys(before.reasons)
    end = len(before.steps)
    if before.tail:
        return replace(before, steps=(*before.steps, *steps))
    for step in steps:
        try:
            added = read(step, form)
        except NotBatchable as why:
            reasons[str(why)] = None
            break
        if light and any(operation.heavy for operation in added):
            reasons[_light_reason(step)] = None
            break
        operations += added
        for operation in added:
            form = operation.form(form)
        end += 1
    all_steps = (*before.steps, *steps)
    if end < len(all_steps) and (form.kind != "tensor" or form.tv):
        raise NotBatchable(next(reversed(reasons)))
    # The draws of earlier calls belong to their operations, so those are not joined with the new ones.
    appended = merge_adjacent(operations[len(before.operations) :])
    return replace(
        before,
        steps=all_steps,
        end=end,
        operations=(*before.operations, *appended),
        exit=form,
        reasons=tuple(reasons),
    )


def _light_reason(step: object) -> str:
    return f'{type(step).__name__} runs on single images, because the value is "light"'


def _longest_run(
    steps: Sequence[Any],
    start: int,
    entry: ImageForm,
    light: bool,
    reasons: dict[str, None],
    unfinished: bool = False,
) -> Lowered | None:
    form, operations = entry, list[BatchOperation]()
    run: Lowered | None = None
    for position in range(start, len(steps)):
        try:
            added = read(steps[position], form)
        except NotBatchable as why:
            reasons[str(why)] = None
            break
        if light and any(operation.heavy for operation in added):
            reasons[_light_reason(steps[position])] = None
            break
        for operation in added:
            operations.append(operation)
            form = operation.form(form)
        last = position + 1 == len(steps)
        if operations and ((form.kind == "tensor" and (last or not form.tv)) or (unfinished and last)):
            run = Lowered(
                tuple(steps), start, position + 1, merge_adjacent(operations), entry, form, tuple(reasons)
            )
    if run is None and not reasons:
        reasons["none of its transforms makes a tensor"] = None
    return run


def count_deterministic(steps: Sequence[Any], images: Iterable[Any]) -> int:
    """How many of the first transforms are known and draw nothing."""
    images = list(images)
    for count, step in enumerate(steps):
        form, _ = _describe(images)
        try:
            operations = read(step, form) if form else None
        except NotBatchable:
            return count
        if operations is None or any(operation.draws(LARGE) != () for operation in operations):
            return count
        images = [step(image) for image in images]
    return len(steps)


def _describe(images: Sequence[Any]) -> tuple[ImageForm | None, bool]:
    forms, shapes = (
        {form_of(image) for image in images},
        {shape_of(image) if form_of(image) else None for image in images},
    )
    return (forms.pop() if len(forms) == 1 else None), len(shapes) == 1
