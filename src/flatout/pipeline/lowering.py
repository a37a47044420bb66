"""Reads a pipeline of transforms: which of them are done to whole batches, and which stay with the single sample, because.

    head | operations | tail      per sample, as a batch, per sample again

The longest run of transforms that are known becomes operations; of several equally long ones the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatout.pipeline import affine, choose, color, erase, readers, resample, tone
from flatout.pipeline.draws import Numbers, Words, columns, understood
from flatout.pipeline.operation import Form, Operation, Shape, Unknown, listed_draws, row_of, rows_together
from flatout.pipeline.operations import joined
from flatout.pipeline.streams import same_states, states

CONTAINERS = ("v1.Compose", "v2.Compose")
PIL_MODES = ("L", "RGB", "RGBA")
LARGE = Shape(3, 2**14, 2**14)  # whatever draws only where there is room draws here


@dataclass(frozen=True)
class Lowered:
    """``start`` transforms stay before the operations, those from ``end`` on stay behind them.

    ``entry`` is the form of images that enter the operations, ``exit`` of those that leave them.
    """

    steps: tuple[Any, ...]
    start: int
    end: int
    operations: tuple[Operation, ...]
    entry: Form
    exit: Form
    reasons: tuple[str, ...] = ()

    @property
    def tail(self) -> tuple[Any, ...]:
        return self.steps[self.end:]

    @property
    def head(self) -> tuple[Any, ...]:
        return self.steps[:self.start]

    @property
    def draws(self) -> bool:
        """Whether its operations take random numbers."""
        return any(operation.draws(LARGE) != () for operation in self.operations)

    @property
    def apart(self) -> float:
        """The farthest a value may be from the plain pipeline's, in its own units; 0 where every bit is the same."""
        found = 0.0
        for operation in self.operations:
            found = found * operation.gain + operation.apart
        return found

    def row(self, shape: Shape, words: Numbers) -> list[Any]:
        """The numbers of one image, an entry for each operation."""
        return row_of(self.operations, shape, words)

    def draw(self, shape: Shape, rows: int, generator: torch.Generator | None = None) -> list[Sequence[Any]]:
        """The numbers of a batch in the order in which images one by one would have drawn them."""
        listed = listed_draws(self.operations, shape)
        if listed is None:
            with Words(generator) as words:
                return self.together([self.row(shape, words) for _ in range(rows)], shape)
        drawn = iter(columns([kind for each in listed for kind in each], rows, generator))
        return [[next(drawn) for _ in each] for each in listed]

    def together(self, rows: Sequence[list[Any]], shape: Shape) -> list[Sequence[Any]]:
        """Rows of numbers as `run` expects them."""
        return rows_together(self.operations, rows, shape)

    def run(self, images: Tensor, numbers: Sequence[Sequence[Any]]) -> Tensor:
        """images [B, C, H, W]; the answer is contiguous."""
        images = images.contiguous()  # channels apart: windows, flips and floats are then long runs of memory
        for operation, mine in zip(self.operations, numbers, strict=True):
            if images.device.type != "cpu":
                mine = [each.to(images.device, non_blocking=True) if isinstance(each, Tensor) else each for each in mine]
            images = operation(images, mine)
        return images.contiguous()


def flat(transform: Any) -> list[Any]:
    """The transforms of nested Compose and Sequential, in order."""
    if name_of(transform) in CONTAINERS:
        return [step for inner in transform.transforms for step in flat(inner)]
    if type(transform) is torch.nn.Sequential:
        return [step for inner in transform for step in flat(inner)]
    return [transform]


def name_of(transform: Any) -> str:
    """``v1.RandomCrop``, or nothing where it is no transform of torchvision's own."""
    kind = type(transform)
    module = kind.__module__
    if module.startswith("torchvision.transforms.v2."):
        return f"v2.{kind.__name__}"
    return f"v1.{kind.__name__}" if module == "torchvision.transforms.transforms" else ""


def read(transform: Any, form: Form) -> Sequence[Operation]:
    """Raises Unknown with a sentence."""
    name = name_of(transform)
    if name not in READERS:
        raise Unknown(f"{type(transform).__name__} is not one of the transforms that can be done to a batch")
    if getattr(transform, "_forward_hooks", None) or getattr(transform, "_forward_pre_hooks", None):
        raise Unknown(f"{type(transform).__name__} has hooks")
    try:
        found = READERS[name](transform, form)
    except Unknown as why:
        raise Unknown(f"{type(transform).__name__} stays as it is: {why}") from why
    except (AttributeError, TypeError, ValueError) as error:  # another torchvision may keep other attributes
        raise Unknown(f"{type(transform).__name__} could not be read ({error})") from error
    return [found] if isinstance(found, Operation) else list(found)


READERS = {**readers.READERS, **color.READERS, **tone.READERS, **resample.READERS, **affine.READERS, **erase.READERS, **choose.readers(read)}


def lower(transform: Any, images: Sequence[Any], light: bool = False, unfinished: bool = False) -> Lowered:
    """Read a pipeline with the help of a few images that enter it; ``light`` leaves heavy transforms with the single image.

    ``unfinished``: another call of a transform follows, so its last step may also leave PIL images.
    Moves random generators. Raises Unknown with the reason where nothing can be done to a batch.
    """
    if not understood():
        raise Unknown("this torch draws random numbers in a way that is not known")
    steps = flat(transform)
    seen, drawing = [_describe(images)], []
    for step in steps:
        before = states()
        images = [step(image) for image in images]
        seen.append(_describe(images))
        drawing.append(not same_states(before, states()))
    best: Lowered | None = None
    reasons: dict[str, None] = {}
    for start in range(len(steps)):
        form, uniform = seen[start]
        if form is None or not uniform:
            continue
        if form.kind == "tensor" and any(getattr(step, "inplace", False) for step in steps[start:]):
            reasons["its transforms may change the images of the data set in place"] = None
            continue
        found = _run_from(steps, start, form, light, reasons, unfinished)
        if found is not None and any(drawing[found.end:]):  # an image would draw for it only after all images have drawn for the run
            reasons[f"{type(steps[drawing.index(True, found.end)]).__name__} draws random numbers, and comes behind what could be done to a batch"] = None
            continue
        if found is not None and (best is None or found.end - found.start >= best.end - best.start) and not (best and found.end == best.end):
            best = found
    if best is None:
        raise Unknown(next(reversed(reasons), "its images differ in size or kind, or are of none that is known"))
    return best


def extended(before: Lowered, transform: Any, light: bool = False) -> Lowered:
    """The same with the transform of another call behind it. What cannot be done to a batch joins the steps behind the operations.

    Raises Unknown where these could not be given a single image.
    """
    steps, form, operations = flat(transform), before.exit, list(before.operations)
    reasons: dict[str, None] = dict.fromkeys(before.reasons)
    end = len(before.steps)
    if before.tail:
        return Lowered((*before.steps, *steps), before.start, before.end, before.operations, before.entry, form, before.reasons)
    for step in steps:
        try:
            more = read(step, form)
        except Unknown as why:
            reasons[str(why)] = None
            break
        if light and any(operation.heavy for operation in more):
            reasons[_left(step)] = None
            break
        operations += more
        for operation in more:
            form = operation.form(form)
        end += 1
    every = (*before.steps, *steps)
    if end < len(every) and (form.kind != "tensor" or form.tv):
        raise Unknown(next(reversed(reasons)))
    # What the calls before have drawn belongs to their operations, so these stay apart from the new ones.
    behind = joined(operations[len(before.operations):])
    return Lowered(every, before.start, end, (*before.operations, *behind), before.entry, form, tuple(reasons))


def _left(step: Any) -> str:
    return f'{type(step).__name__} stays with the single image, as "light" says'


def _run_from(steps: Sequence[Any], start: int, entry: Form, light: bool, reasons: dict[str, None], unfinished: bool = False) -> Lowered | None:
    """The longest run from here that ends in tensors: rows of a batch can be handed on to whatever comes behind."""
    form, operations, found = entry, [], None
    for at in range(start, len(steps)):
        try:
            more = read(steps[at], form)
        except Unknown as why:
            reasons[str(why)] = None
            break
        if light and any(operation.heavy for operation in more):
            reasons[_left(steps[at])] = None
            break
        for operation in more:
            operations.append(operation)
            form = operation.form(form)
        last = at + 1 == len(steps)
        if operations and ((form.kind == "tensor" and (last or not form.tv)) or (unfinished and last)):
            found = Lowered(tuple(steps), start, at + 1, joined(operations), entry, form, tuple(reasons))
    if found is None and not reasons:
        reasons["none of its transforms makes a tensor"] = None
    return found


def deterministic(steps: Sequence[Any], images: Iterable[Any]) -> int:
    """How many of the first transforms draw nothing, as far as they are known."""
    images = list(images)
    for at, step in enumerate(steps):
        form, _ = _describe(images)
        try:
            operations = read(step, form) if form else None
        except Unknown:
            return at
        if operations is None or any(operation.draws(LARGE) != () for operation in operations):
            return at
        images = [step(image) for image in images]
    return len(steps)


def _describe(images: Sequence[Any]) -> tuple[Form | None, bool]:
    """The form that all of them have, and whether they are of one shape."""
    forms, shapes = {form_of(image) for image in images}, {shape_of(image) if form_of(image) else None for image in images}
    return (forms.pop() if len(forms) == 1 else None), len(shapes) == 1


def form_of(image: Any) -> Form | None:
    """None where it is no image that is known."""
    if isinstance(image, Tensor):
        tv = type(image).__module__.startswith("torchvision.tv_tensors")
        known = (type(image) is Tensor or (tv and type(image).__name__ == "Image")) and image.dim() == 3 and image.layout == torch.strided
        return Form("tensor", image.dtype, tv=tv) if known and image.device.type == "cpu" and not image.requires_grad else None
    if type(image).__module__.split(".")[0] == "PIL":
        return Form("pil", mode=image.mode) if image.mode in PIL_MODES else None
    if type(image).__module__ == "numpy" and type(image).__name__ == "ndarray":
        return Form("numpy") if str(image.dtype) == "uint8" and image.ndim in (2, 3) else None
    return None


def shape_of(image: Any) -> Shape:
    """Of an image of a known form, without touching its pixels."""
    if isinstance(image, Tensor):
        return Shape(*image.shape)
    if hasattr(image, "getbands"):
        return Shape(len(image.getbands()), image.height, image.width)
    return Shape(1, *image.shape) if image.ndim == 2 else Shape(image.shape[2], *image.shape[:2])


def copied(image: Any) -> Any:
    """The same image in memory of its own; what is no image is answered as it is."""
    if isinstance(image, Tensor):
        return image.clone()
    return image.copy() if hasattr(image, "getbands") or type(image).__name__ == "ndarray" else image


def same_pixels(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return bool(torch.equal(torch.nan_to_num(a.as_subclass(Tensor)), torch.nan_to_num(b.as_subclass(Tensor))))
    if hasattr(a, "getbands"):
        return bool(a.tobytes() == b.tobytes())
    return bool(a.tobytes() == b.tobytes()) if type(a).__name__ == "ndarray" else True


def stack(images: Sequence[Any], shape: Shape | None = None) -> Tensor:
    """Images of one known form and shape as [B, C, H, W], of any strides. PIL images may be given as their bytes, with the shape."""
    first = images[0]
    if isinstance(first, Tensor):
        return torch.stack([image.as_subclass(Tensor) for image in images])
    if hasattr(first, "getbands"):  # a PIL image: its bytes at half the price of an array for each
        images, shape = [image.tobytes() for image in images], shape_of(first)
    if shape is not None and isinstance(images[0], bytes):
        pixels = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
        return pixels.view(len(images), shape.height, shape.width, shape.channels).permute(0, 3, 1, 2)
    import numpy

    arrays = torch.from_numpy(numpy.stack(images))
    return arrays.unsqueeze(1) if arrays.dim() == 3 else arrays.permute(0, 3, 1, 2)
