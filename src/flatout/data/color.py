"""ColorJitter, Grayscale and RandomGrayscale on a batch, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_float
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from flatout.data.draws import Draw, Integer, Uniform
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, Reader
from flatout.data.operations import divide_in_place

# Hue rotation for a batch of images, one rotation per image: Pillow's for bytes, torchvision's for tensors.
#
# Images are float32 [B, 3, H, W]; byte images hold whole numbers. ``turns`` [B] are fractions of the circle,
# -0.5 to 0.5.

# For red, green and blue: which of value, middle and lowest (0, 1, 2) it is in each sixth of the circle.
LEVEL_OF_CHANNEL = ((0, 1, 2, 2, 1, 0), (1, 0, 0, 1, 2, 2), (2, 2, 1, 0, 0, 1))


class _Tables(NamedTuple):
    hue: Tensor  # [3 * 256 * 256] by the highest channel and the two distances below it, the increasing one first
    saturation: (
        Tensor  # [256 * 256] by the highest channel and the spread: a fraction, rounded through a byte
    )
    lowest: Tensor  # [256 * 256] with the same index: the lowest channel of the result
    fraction: Tensor  # [256] by the hue: the position in its sixth, from the end in every other one
    single_precision: Tensor  # [256] by the hue: whether C multiplies by it in single precision
    channel_levels: Tensor  # [3, 256] by the hue: which of value, middle and lowest each channel takes


@cache
def _tables() -> _Tables:
    """Return tables for Pillow's Convert.c, rgb2hsv_row and hsv2rgb, with C's promotions to double."""
    steps = torch.arange(256, dtype=torch.float32)
    up, down = steps[:, None], steps
    spread = torch.maximum(up, down).clamp(min=1)
    up, down = up / spread, down / spread
    branches = [
        up - down,
        (2.0 + up.double() - down.double()).float(),
        (4.0 + up.double() - down.double()).float(),
    ]
    circle = torch.stack(branches).double().div(6.0).add(1.0).fmod(1.0).float()
    hue = circle.double().mul(255.0).int().flatten()

    highest, spread = steps[:, None], steps
    saturation = (
        (spread / highest.clamp(min=1)).double().mul(255.0).floor().clamp(max=255).div(255.0).float().double()
    )
    lowest = ((1.0 - saturation) * highest.double() + 0.5).floor().float()

    sixths = steps.double() * 6.0 / 255.0
    sector = sixths.floor()
    fraction = (sixths - sector).float().double()
    sector = sector.long() % 6  # a hue of 255 is the full circle
    single_precision = sector % 2 == 1
    return _Tables(
        hue,
        saturation.flatten(),
        lowest.flatten(),
        torch.where(single_precision, fraction, 1.0 - fraction),
        single_precision,
        torch.tensor(LEVEL_OF_CHANNEL)[:, sector],
    )


def rotate_byte_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Convert to HSV bytes, add to the hue byte with wrap-around, and convert back, bit for bit as Pillow."""
    tables = _tables()
    highest, below = images.amax(1), images.amax(1, keepdim=True) - images
    spread = below.amax(1)
    red, green, blue = below.unbind(1)
    is_red, is_green = red == 0, green == 0
    up = torch.where(is_red, blue, torch.where(is_green, red, green))
    down = torch.where(is_red, green, torch.where(is_green, blue, red))
    branch = torch.where(is_red, 0.0, torch.where(is_green, 65536.0, 131072.0))
    steps = (turns.double() * 255).int().view(-1, 1, 1)  # towards zero, as numpy.int32 does
    hue = (_lookup(tables.hue, up.mul_(256).add_(down).add_(branch)) + steps) & 255
    index = highest * 256 + spread
    product = _lookup(tables.saturation, index) * _lookup(tables.fraction, hue)
    product = torch.where(_lookup(tables.single_precision, hue), product.float().double(), product)
    middle = (1.0 - product).mul_(highest).add_(0.5).floor_().float()
    levels = torch.stack((highest, middle, _lookup(tables.lowest, index)), dim=1)
    return levels.gather(1, tables.channel_levels[:, hue.long()].transpose(0, 1))


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.flatten().int()).view(index.shape)


def rotate_hue(images: Tensor, turns: Tensor, v2: bool) -> Tensor:
    """Rotate the hue of images in [0, 1]. v2 multiplies by reciprocals and adds in a different order."""
    lowest, highest = torch.aminmax(images, dim=1)
    grey = highest == lowest
    spread = highest - lowest
    saturation = spread / torch.where(grey, 1.0, highest)
    red, green, blue = ((highest.unsqueeze(1) - images) / torch.where(grey, 1.0, spread).unsqueeze(1)).unbind(
        1
    )
    is_red, is_green = images[:, 0] == highest, images[:, 1] == highest
    hue = torch.where(is_red, blue - green, torch.where(is_green, red + 2.0 - blue, green + 4.0 - red))
    hue = hue.mul_(1.0 / 6.0) if v2 else divide_in_place(hue, 6)
    hue = hue.add_(1.0).fmod_(1.0).add_(turns.view(-1, 1, 1)).remainder_(1.0).mul_(6)
    sector = hue.floor()
    fraction = hue - sector
    if v2:
        product, rest = saturation * fraction, 1.0 - saturation
        falling, rising = (1.0 - product) * highest, (product + rest) * highest
    else:
        rest = 1.0 - saturation
        falling, rising = (
            highest * (1.0 - saturation * fraction),
            highest * (1.0 - saturation * (1.0 - fraction)),
        )
    sector = sector.long() % 6
    middle = torch.where(sector % 2 == 1, falling, rising).clamp_(0.0, 1.0)
    levels = torch.stack((highest, middle, (rest * highest).clamp_(0.0, 1.0)), dim=1)
    return levels.gather(1, torch.tensor(LEVEL_OF_CHANNEL)[:, sector].transpose(0, 1))


# Brightness, contrast, saturation and grey for a batch, with one factor per image.
#
# Three implementations differ in where they round. Images are float32 [B, C, H, W]; byte images hold whole
# numbers before and after. Factors are float32 [B].

MAX_EXACT_SUM = 2**24  # float32 adds whole numbers up to here exactly, in any order


class ColorArithmetic(Protocol):
    """One implementation. Images of one channel keep their saturation and hue."""

    def grey(self, images: Tensor) -> Tensor:
        """Convert [B, 3, H, W] to [B, 1, H, W]."""

    def brightness(self, images: Tensor, factors: Tensor) -> Tensor: ...

    def contrast(self, images: Tensor, factors: Tensor) -> Tensor: ...

    def saturation(self, images: Tensor, factors: Tensor) -> Tensor: ...

    def hue(self, images: Tensor, factors: Tensor) -> Tensor: ...


def _per_image(factors: Tensor) -> Tensor:
    return factors.view(-1, 1, 1, 1)


@dataclass(frozen=True)
class PillowColorArithmetic:
    """Bytes as in Pillow's ImageEnhance: Blend.c interpolates from the degenerate image and truncates."""

    def grey(self, images: Tensor) -> Tensor:
        """Convert as L24 of Convert.c. Its sums stay below 2**24, so float32 is exact."""
        red, green, blue = images.unbind(1)
        sums = red.mul(19595.0).add_(green, alpha=38470.0).add_(blue, alpha=7471.0).add_(0x8000)
        return sums.mul_(2.0**-16).floor_().unsqueeze(1)

    def brightness(self, images: Tensor, factors: Tensor) -> Tensor:
        return images.mul(_per_image(factors)).clamp_(0, 255).floor_()

    def contrast(self, images: Tensor, factors: Tensor) -> Tensor:
        grey = images if images.shape[1] == 1 else self.grey(images)
        count = grey[0].numel()
        # ImageStat divides Python's integers
        mean = divide_in_place(grey.sum(dim=(1, 2, 3), dtype=torch.float64), count).add_(0.5).floor_()
        return self._blend(_per_image(mean.float()), images, factors)

    def saturation(self, images: Tensor, factors: Tensor) -> Tensor:
        return images if images.shape[1] == 1 else self._blend(self.grey(images), images, factors)

    def hue(self, images: Tensor, factors: Tensor) -> Tensor:
        return images if images.shape[1] == 1 else rotate_byte_hue(images, factors)

    def _blend(self, degenerate: Tensor, images: Tensor, factors: Tensor) -> Tensor:
        return images.sub(degenerate).mul_(_per_image(factors)).add_(degenerate).clamp_(0, 255).floor_()


@dataclass(frozen=True)
class TensorColorArithmetic:
    """Tensors as in torchvision's functional. ``is_bytes`` means uint8, which truncates after each step."""

    is_bytes: bool
    v2: bool  # multiplies and adds with one rounding, where v1 rounds twice

    @property
    def max_value(self) -> int:
        return 255 if self.is_bytes else 1

    def grey(self, images: Tensor) -> Tensor:
        red, green, blue = images.unbind(1)
        grey = red.mul(0.2989)
        if self.v2:
            grey.add_(green, alpha=0.587).add_(blue, alpha=0.114)
        else:
            grey.add_(green.mul(0.587)).add_(blue.mul(0.114))
        return self._truncate(grey).unsqueeze(1)

    def brightness(self, images: Tensor, factors: Tensor) -> Tensor:
        return self._truncate(images.mul(_per_image(factors)).clamp_(0, self.max_value))

    def contrast(self, images: Tensor, factors: Tensor) -> Tensor:
        grey = images if images.shape[1] == 1 else self.grey(images)
        if self.is_bytes and grey[0].numel() * 255 <= MAX_EXACT_SUM:
            mean = grey.mean(dim=(1, 2, 3))
        else:  # a sum that rounds is the same only if taken the same way, over one image
            mean = torch.stack([torch.mean(image, dim=(-3, -2, -1)) for image in grey])
        return self._blend(images, _per_image(mean).expand_as(grey), factors)

    def saturation(self, images: Tensor, factors: Tensor) -> Tensor:
        return images if images.shape[1] == 1 else self._blend(images, self.grey(images), factors)

    def hue(self, images: Tensor, factors: Tensor) -> Tensor:
        if images.shape[1] == 1:
            return images
        if not self.is_bytes:
            return rotate_hue(images, factors, self.v2)
        floats = images.mul(1.0 / 255) if self.v2 else divide_in_place(images.clone(), 255)
        return rotate_hue(floats, factors, self.v2).mul_(256.0 - 1e-3).floor_()

    def _blend(self, images: Tensor, degenerate: Tensor, factors: Tensor) -> Tensor:
        blended = images.mul(_per_image(factors))
        rest = 1.0 - factors.double()
        if self.v2:  # torch.add fuses a scalar alpha if the CPU can; hence one call per image
            for row, image, alpha in zip(blended, degenerate, rest.tolist(), strict=True):
                row.add_(image, alpha=alpha)
        else:
            blended.add_(degenerate.mul(_per_image(rest.float())))
        return self._truncate(blended.clamp_(0, self.max_value))

    def _truncate(self, images: Tensor) -> Tensor:
        return images.floor_() if self.is_bytes else images


def color_arithmetic(form: ImageForm, v2: bool) -> ColorArithmetic:
    """The arithmetic that torchvision uses for images of this form."""
    if form.kind == "pil" and form.mode in ("L", "RGB"):
        return PillowColorArithmetic()
    if form.kind == "tensor" and form.dtype in (torch.uint8, torch.float32):
        return TensorColorArithmetic(is_bytes=form.dtype == torch.uint8, v2=v2)
    raise NotBatchable(
        f"colour transforms do not run in batches on {form.mode or form.dtype} images ({form.kind})"
    )


def _check_channels(operation: BatchOperation, shape: ImageShape) -> None:
    if shape.channels not in (1, 3):
        raise ValueError(
            f"{type(operation).__name__} supports images with 1 or 3 channels, not {shape.channels}"
        )


@dataclass(frozen=True)
class Grey(BatchOperation):
    """Convert to grey, with one channel or three equal ones (``channels`` 0 keeps the number)."""

    arithmetic: ColorArithmetic
    channels: int
    mode: str = ""  # mode of the resulting PIL image
    repeats: bool = True  # whether one channel becomes three; v1 does not change a one-channel tensor

    def shape(self, shape: ImageShape) -> ImageShape:
        _check_channels(self, shape)
        return (
            shape._replace(channels=self.channels or shape.channels)
            if shape.channels == 3 or self.repeats
            else shape
        )

    def form(self, form: ImageForm) -> ImageForm:
        return replace(form, mode=self.mode or form.mode)

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        channels = self.shape(ImageShape(*images.shape[1:])).channels
        grey = images if images.shape[1] == 1 else self.arithmetic.grey(images.float()).to(images.dtype)
        return grey.expand(-1, channels, -1, -1)


@dataclass(frozen=True)
class RandomGrey(BatchOperation):
    """Convert an image to grey with probability ``p``, which torchvision compares in single precision."""

    grey: Grey
    p: float

    def shape(self, shape: ImageShape) -> ImageShape:
        return self.grey.shape(shape)

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        return (Uniform(),)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        chosen = numbers[0].double() < c_float(self.p).value
        result = images.clone()
        result[chosen] = self.grey(images[chosen], ())
        return result


@dataclass(frozen=True)
class Jitter(BatchOperation):
    """Change brightness, contrast, saturation and hue in a random order, each by a random factor.

    A range of None leaves that property unchanged.
    """

    heavy: ClassVar[bool] = True  # type: ignore[misc]
    arithmetic: ColorArithmetic
    ranges: tuple[tuple[float, float] | None, ...]
    apart: float = 0.0

    def shape(self, shape: ImageShape) -> ImageShape:
        _check_channels(self, shape)
        return shape

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        order = (Integer(4), Integer(3), Integer(2))  # torch.randperm(4)
        return order + tuple(Uniform(*bounds) for bounds in self.ranges if bounds is not None)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        steps = [index for index, bounds in enumerate(self.ranges) if bounds is not None]
        changes = [
            (
                self.arithmetic.brightness,
                self.arithmetic.contrast,
                self.arithmetic.saturation,
                self.arithmetic.hue,
            )[step]
            for step in steps
        ]
        result = torch.empty(images.shape, dtype=torch.float32).copy_(images)
        positions = _positions(numbers[:3], len(images))[:, steps]
        rank = (positions.unsqueeze(1) < positions.unsqueeze(2)).sum(2)  # among the steps that run
        for position in range(len(steps)):
            for index, change in enumerate(changes):
                rows = (rank[:, index] == position).nonzero().squeeze(1)
                if len(rows) == len(images):
                    result = change(result, numbers[3 + index])
                elif len(rows):
                    result[rows] = change(result[rows], numbers[3 + index][rows])
        return result.to(images.dtype)


def _positions(numbers: Sequence[Tensor], rows: int) -> Tensor:
    """The position of each of four steps, [B, 4], in the permutation of torch.randperm.

    torch.randperm makes it from these three words, swapping from the front.
    """
    order = torch.arange(4).repeat(rows, 1)
    for at, number in enumerate(numbers):
        both = torch.stack((torch.full_like(number, at), number + at), dim=1)
        order = order.scatter(1, both.flip(1), order.gather(1, both))
    return order.argsort(1)


FLOAT_MEAN = 2.0**-20  # the summation order of a mean over an image depends on the number of threads


def _jitter(v2: bool, transform: object, form: ImageForm) -> BatchOperation:
    ranges = tuple(getattr(transform, name) for name in ("brightness", "contrast", "saturation", "hue"))
    floats = form.kind == "tensor" and form.dtype.is_floating_point and ranges[1] is not None
    return Jitter(color_arithmetic(form, v2), ranges, FLOAT_MEAN if floats else 0.0)


def _grey(v2: bool, transform: Module, form: ImageForm) -> BatchOperation:
    channels = transform.num_output_channels
    if channels not in (1, 3):
        raise NotBatchable(f"Grayscale to {channels} channels is not supported")
    pil = form.kind == "pil"
    mode = ("L" if channels == 1 else "RGB") if pil else ""
    return Grey(color_arithmetic(form, v2), channels, mode, repeats=v2 or pil)


def _random_grey(v2: bool, transform: Module, form: ImageForm) -> BatchOperation:
    return RandomGrey(Grey(color_arithmetic(form, v2), 0), transform.p)


READERS: dict[str, Reader] = {
    f"v{1 + v2}.{name}": partial(read, v2)
    for name, read in (("ColorJitter", _jitter), ("Grayscale", _grey), ("RandomGrayscale", _random_grey))
    for v2 in (False, True)
}
