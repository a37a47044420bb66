"""Batch operations for torchvision's transforms that move or rescale pixels, read from their attributes.

A key names the family and the class: v1 is ``torchvision.transforms``, v2 is ``torchvision.transforms.v2``.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from flatout.data.operation import BatchOperation, ImageForm, NotBatchable, Reader
from flatout.data.operations import (
    CenterPart,
    Convert,
    Flip,
    Normalize,
    Pad,
    PadTo,
    ScaleBytes,
    ToTensor,
    Window,
)

MODES = ("constant", "edge", "reflect", "symmetric")


def flip(axis: int) -> Reader:
    return lambda transform, form: Flip(axis, float(transform.p))


def pad(transform: Module, form: ImageForm) -> BatchOperation:
    return Pad(*sides(transform.padding), *_filling(transform, form))


def random_crop(separate_axes: bool, transform: Module, form: ImageForm) -> Sequence[BatchOperation]:
    height, width = transform.size
    filling = _filling(transform, form)
    steps: list[BatchOperation] = []
    if transform.padding is not None:
        left, top, right, bottom = sides(transform.padding)
        # v2 stores left, right, top, bottom; v1 stores the given value
        steps.append(
            Pad(left, right, top, bottom, *filling)
            if separate_axes
            else Pad(left, top, right, bottom, *filling)
        )
    if transform.pad_if_needed:
        steps.append(PadTo(height, width, *filling))
    return [*steps, Window(height, width, separate_axes)]


def center_crop(transform: Module, form: ImageForm) -> BatchOperation:
    height, width = transform.size
    return CenterPart(int(height), int(width))


def normalize(transform: Module, form: ImageForm) -> BatchOperation:
    if form.kind != "tensor" or not form.dtype.is_floating_point:
        raise NotBatchable("it needs a floating-point tensor")
    mean, deviation = (
        tuple(float(v) for v in torch.as_tensor(values).flatten().tolist())
        for values in (transform.mean, transform.std)
    )
    if 0 in torch.tensor(deviation, dtype=form.dtype):
        raise NotBatchable("it has a standard deviation of zero")
    return Normalize(mean, deviation)


def to_tensor(transform: object, form: ImageForm) -> Sequence[BatchOperation]:
    if form.kind == "tensor" or form.dtype != torch.uint8:
        raise NotBatchable("its input is not a byte image")
    return [ToTensor(), ScaleBytes(torch.get_default_dtype())]


def to_bytes(tv: bool, transform: object, form: ImageForm) -> BatchOperation:
    if form.kind == "tensor" and not tv:
        raise NotBatchable("its input is already a tensor")
    return ToTensor(tv)


def to_pure_tensor(transform: object, form: ImageForm) -> Sequence[BatchOperation]:
    return (ToTensor(),) if form.kind == "tensor" else ()


def convert(divide: bool, transform: Module, form: ImageForm) -> Sequence[BatchOperation]:
    dtype, scale = transform.dtype, getattr(transform, "scale", True)
    if not isinstance(dtype, torch.dtype):
        raise NotBatchable("it has a dtype for each kind of input")
    if form.kind != "tensor":
        raise NotBatchable("its input is not a tensor")
    if dtype == form.dtype:
        return ()
    if not scale or (form.dtype.is_floating_point and dtype.is_floating_point):
        return (Convert(dtype),)
    if form.dtype == torch.uint8 and dtype.is_floating_point:
        return (ScaleBytes(dtype, divide),)
    raise NotBatchable(f"it converts from {form.dtype} to {dtype}")


def nothing(transform: object, form: ImageForm) -> Sequence[BatchOperation]:
    return ()


def sides(padding: int | Sequence[int]) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a padding given as one, two or four numbers."""
    values = (padding,) if isinstance(padding, int) else tuple(padding)
    padded_sides = {1: values * 4, 2: values * 2, 4: values}.get(len(values))
    if padded_sides is None or any(not isinstance(v, int) or v < 0 for v in padded_sides):
        raise NotBatchable(f"it has the padding {padding!r}")
    return padded_sides[0], padded_sides[1], padded_sides[2], padded_sides[3]


def _filling(transform: Module, form: ImageForm) -> tuple[str, tuple[float, ...]]:
    mode, fill = str(getattr(transform.padding_mode, "value", transform.padding_mode)), transform.fill
    if mode not in MODES:
        raise NotBatchable(f"it has the padding mode {mode!r}")
    if mode != "constant":
        return mode, (0,)
    values = (0,) if fill is None else tuple(fill) if isinstance(fill, (tuple, list)) else (fill,)
    whole = not form.dtype.is_floating_point
    if any(not isinstance(v, (int, float)) or (whole and (v != int(v) or not 0 <= v <= 255)) for v in values):
        raise NotBatchable(f"it fills with {fill!r}")
    if form.kind == "pil" and len(values) not in (1, len(form.mode)):
        raise NotBatchable(f"it fills an image of mode {form.mode} with {fill!r}")
    return mode, tuple(values)


def _both(name: str, v1: Reader, v2: Reader) -> dict[str, Reader]:
    return {f"v1.{name}": v1, f"v2.{name}": v2}


def _same(name: str, reader: Callable[[Any, ImageForm], Any]) -> dict[str, Reader]:
    return _both(name, reader, reader)


READERS: dict[str, Reader] = {
    **_same("RandomHorizontalFlip", flip(-1)),
    **_same("RandomVerticalFlip", flip(-2)),
    **_same("Pad", pad),
    **_both("RandomCrop", partial(random_crop, False), partial(random_crop, True)),
    **_same("CenterCrop", center_crop),
    **_same("Normalize", normalize),
    **_same("ToTensor", to_tensor),
    **_same("PILToTensor", partial(to_bytes, False)),
    "v2.ToImage": partial(to_bytes, True),
    "v2.ToPureTensor": to_pure_tensor,
    "v2.ToDtype": partial(convert, False),
    **_both("ConvertImageDtype", partial(convert, True), partial(convert, False)),
    "v2.Identity": nothing,
}
