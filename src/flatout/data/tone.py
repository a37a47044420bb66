"""Fixed tone changes with a probability: invert, posterize, solarize, autocontrast, equalize, sharpen.

Results are bit for bit those of torchvision. Pillow computes the first five with a table of 256 entries per
channel; the arithmetic here gives the same integers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module

from flatout.data.choose import RandomBranch, single
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, Reader


@dataclass(frozen=True)
class Tone(BatchOperation):
    """Base of operations that change values, but not shape or form."""

    heavy: ClassVar[bool] = True  # type: ignore[misc]

    def shape(self, shape: ImageShape) -> ImageShape:
        if shape.channels not in (1, 3):
            raise ValueError(
                f"{type(self).__name__} supports images with 1 or 3 channels, not {shape.channels}"
            )
        return shape


@dataclass(frozen=True)
class Invert(Tone):
    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        return images.bitwise_not() if images.dtype == torch.uint8 else 1.0 - images


@dataclass(frozen=True)
class Posterize(Tone):
    bits: int

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        if images.dtype == torch.uint8:
            return images & (256 - (1 << (8 - self.bits)))
        levels = 1 << self.bits
        return images.mul(levels).floor_().clamp_(0, levels - 1).mul_(1.0 / levels)


@dataclass(frozen=True)
class Solarize(Tone):
    threshold: float

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        return torch.where(images >= self.threshold, Invert()(images, ()), images)


@dataclass(frozen=True)
class Autocontrast(Tone):
    """``arithmetic``: "pil" (ImageOps, double precision, truncated), "v1" or "v2" (single precision)."""

    arithmetic: str

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        pillow = self.arithmetic == "pil"
        bound = 255 if images.dtype == torch.uint8 else 1
        lowest, highest = (
            each.to(torch.float64 if pillow else torch.float32)
            for each in (images.amin((2, 3), True), images.amax((2, 3), True))
        )
        spread = highest - lowest
        flat = spread == 0
        lowest = lowest.masked_fill(flat, 0)
        if pillow:
            scale = (
                torch.full_like(spread, 255.0).div_(spread).masked_fill(flat, 1)
            )  # number / tensor would multiply by a reciprocal
            stretched = images.double().mul_(scale).add_(-lowest * scale)
        elif self.arithmetic == "v1":
            stretched = images.sub(lowest).mul_((bound / spread).masked_fill(flat, 1))
        else:
            stretched = images.sub(lowest).div_(spread.mul(1.0 / bound).masked_fill(flat, 1))
        return stretched.clamp_(0, bound).to(images.dtype)


@dataclass(frozen=True)
class Equalize(Tone):
    """Bytes: each value becomes the share of pixels below it, in steps of 1/255 of the non-brightest."""

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        batch, channels, height, width = images.shape
        planes = images.reshape(batch * channels, height * width).long()
        offsets = torch.arange(len(planes)).mul_(256).unsqueeze(1)
        counts = (planes + offsets).flatten().bincount(minlength=256 * len(planes)).view(-1, 256)
        below = counts.cumsum(1) - counts
        brightest = planes.amax(1, keepdim=True)
        step = below.gather(1, brightest) // 255
        table = ((below + step // 2) // step.clamp(min=1)).clamp_(max=255)
        table = torch.where(step == 0, torch.arange(256), table).to(torch.uint8)
        return table.flatten()[planes + offsets].view(images.shape)


@dataclass(frozen=True)
class Sharpen(Tone):
    """Bytes: move away from (or below 1, towards) the mean of 3 x 3 pixels. The middle counts five times.

    The border does not change.
    """

    factor: float
    arithmetic: str  # as in Autocontrast

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        if min(images.shape[2:]) < 3:
            return images
        floats = images.float()
        smooth = floats.clone()
        rows = floats[:, :, :-2] + floats[:, :, 1:-1] + floats[:, :, 2:]
        inside = floats[:, :, 1:-1, 1:-1]
        sums = inside.mul(4.0).add_(rows[..., :-2]).add_(rows[..., 1:-1]).add_(rows[..., 2:])
        # A 13th of an integer is never close to a tie, so the mean rounds the same in every method.
        smooth[:, :, 1:-1, 1:-1] = sums.div_(13).round_()
        if self.arithmetic == "pil":
            sharp = (floats - smooth).mul_(self.factor).add_(smooth)
        elif self.arithmetic == "v1":
            sharp = floats.mul(self.factor).add_(smooth.mul(1.0 - self.factor))
        else:
            sharp = floats.add(smooth.sub_(floats), alpha=1.0 - self.factor)
        return sharp.clamp_(0, 255).to(torch.uint8)


def _arithmetic(transform: object, form: ImageForm, v2: bool, floats: bool = True) -> str:
    if form.kind == "pil" and form.mode in ("L", "RGB"):
        return "pil"
    if form.kind == "tensor" and (form.dtype == torch.uint8 or (floats and form.dtype == torch.float32)):
        return "v2" if v2 else "v1"
    raise NotBatchable(
        f"{type(transform).__name__} does not run in batches on {form.mode or form.dtype} images ({form.kind})"
    )


def _reader(v2: bool, change: Callable[[Any, ImageForm, bool], BatchOperation]) -> Reader:
    def read(transform: Module, form: ImageForm) -> BatchOperation:
        # v1 compares torch.rand(1).item() with p, v2 torch.rand(1), in single precision
        return RandomBranch((change(transform, form, v2),), single(transform.p) if v2 else transform.p)

    return read


def _invert(transform: object, form: ImageForm, v2: bool) -> BatchOperation:
    _arithmetic(transform, form, v2)
    return Invert()


def _posterize(transform: Module, form: ImageForm, v2: bool) -> BatchOperation:
    _arithmetic(transform, form, v2, floats=v2)
    if not isinstance(transform.bits, int) or not 1 <= transform.bits <= 8:
        raise NotBatchable(f"it posterizes to {transform.bits} bits, and batches support 1 to 8")
    return Posterize(transform.bits)


def _solarize(transform: Module, form: ImageForm, v2: bool) -> BatchOperation:
    if _arithmetic(transform, form, v2) == "pil":
        return Solarize(
            float(math.ceil(transform.threshold))
        )  # Pillow compares integers with it, in double precision
    if transform.threshold > (255 if form.dtype == torch.uint8 else 1):
        raise NotBatchable(f"torchvision rejects the threshold {transform.threshold} for {form.dtype}")
    return Solarize(transform.threshold)


def _autocontrast(transform: object, form: ImageForm, v2: bool) -> BatchOperation:
    return Autocontrast(_arithmetic(transform, form, v2))


def _equalize(transform: object, form: ImageForm, v2: bool) -> BatchOperation:
    _arithmetic(transform, form, v2, floats=False)
    return Equalize()


def _sharpen(transform: Module, form: ImageForm, v2: bool) -> BatchOperation:
    """Read RandomAdjustSharpness. Floats are unsupported: their rounding depends on the batch size."""
    arithmetic = _arithmetic(transform, form, v2, floats=False)
    if arithmetic != "pil" and transform.sharpness_factor < 0:
        raise NotBatchable(f"torchvision rejects the sharpness {transform.sharpness_factor}")
    return Sharpen(transform.sharpness_factor, arithmetic)


CHANGES = {
    "RandomInvert": _invert,
    "RandomPosterize": _posterize,
    "RandomSolarize": _solarize,
    "RandomAutocontrast": _autocontrast,
    "RandomEqualize": _equalize,
    "RandomAdjustSharpness": _sharpen,
}
READERS: dict[str, Reader] = {
    f"{family}.{name}": _reader(family == "v2", change)
    for name, change in CHANGES.items()
    for family in ("v1", "v2")
}
