"""Padding, crops, flips, float conversion and normalisation on a batch, bit for bit as in torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import TypeAlias

import torch
from torch import Tensor

from flatout.data.draws import Draw, Integer, Uniform
from flatout.data.operation import BatchOperation, ImageForm, ImageShape


@lru_cache(maxsize=256)
def constant(values: float | Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, copied once: the host waits for such a copy."""
    return torch.tensor(values, dtype=dtype, device=device)


@dataclass(frozen=True)
class Flip(BatchOperation):
    """Mirror about ``axis`` (-1 left and right, -2 top and bottom) with probability ``p``."""

    axis: int
    p: float

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        return (Uniform(),)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        chosen, flipped = numbers[0] < self.p, images.flip(self.axis)
        if images.device.type != "cpu":
            return torch.where(chosen.view(-1, 1, 1, 1), flipped, images)
        return torch.stack([(flipped if flip else images)[i] for i, flip in enumerate(chosen.tolist())])


@dataclass(frozen=True)
class Pad(BatchOperation):
    """Pad every side. ``fill`` has one number per channel, or one for all; only the constant mode uses it."""

    left: int
    top: int
    right: int
    bottom: int
    mode: str = "constant"
    fill: tuple[float, ...] = (0,)

    def shape(self, shape: ImageShape) -> ImageShape:
        if self.mode == "reflect" and (
            max(self.top, self.bottom) >= shape.height or max(self.left, self.right) >= shape.width
        ):
            raise ValueError(
                f"{self} reflects more pixels than an image of {shape.height} x {shape.width} has"
            )
        return ImageShape(
            shape.channels, shape.height + self.top + self.bottom, shape.width + self.left + self.right
        )

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        batch, *dimensions = images.shape
        old = ImageShape(*dimensions)
        if self.mode != "constant":
            rows = _positions(old.height, self.top, self.bottom, self.mode, images.device)
            columns = _positions(old.width, self.left, self.right, self.mode, images.device)
            return images.index_select(2, rows).index_select(3, columns)
        new = self.shape(old)
        if len(self.fill) == 1:
            padded = images.new_full((batch, *new), self.fill[0])
        else:
            padded = (
                constant(self.fill, images.dtype, images.device)
                .view(-1, 1, 1)
                .repeat(batch, 1, new.height, new.width)
            )
        padded[:, :, self.top : self.top + old.height, self.left : self.left + old.width] = images
        return padded


@lru_cache(maxsize=256)
def _positions(length: int, before: int, after: int, mode: str, device: torch.device) -> Tensor:
    source = torch.arange(-before, length + after)
    if mode == "edge" or length == 1:
        return source.clamp(0, length - 1).to(device)
    last = 2 * length - 1 - (mode == "reflect")
    source = source % (last + (mode != "reflect"))
    return torch.where(source < length, source, last - source).to(device)


@dataclass(frozen=True)
class PadTo(BatchOperation):
    """Pad both sides of a too small image by the full difference, so that it exceeds the requested size."""

    height: int
    width: int
    mode: str
    fill: tuple[float, ...]

    def _pad(self, shape: ImageShape) -> Pad:
        rows, columns = max(0, self.height - shape.height), max(0, self.width - shape.width)
        return Pad(columns, rows, columns, rows, self.mode, self.fill)

    def shape(self, shape: ImageShape) -> ImageShape:
        return self._pad(shape).shape(shape)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        pad = self._pad(ImageShape(*images.shape[1:]))
        return pad(images, numbers) if pad.top or pad.left else images


Column: TypeAlias = Tensor | None  # one number per image


@dataclass(frozen=True)
class Window(BatchOperation):
    """Crop a window of this size at a random position. An image of exactly this size draws nothing.

    Then mirror it with probability ``flip``.
    """

    height: int
    width: int
    separate_axes: bool = False  # v2 draws for each axis separately, v1 for both or none
    flip: float | None = None

    def _random_axes(self, shape: ImageShape) -> tuple[bool, bool]:
        rows, columns = shape.height > self.height, shape.width > self.width
        return (rows, columns) if self.separate_axes else (rows or columns, rows or columns)

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        rows, columns = self._random_axes(shape)
        return (
            *(Integer(shape.height - self.height + 1),) * rows,
            *(Integer(shape.width - self.width + 1),) * columns,
            *(Uniform(),) * (self.flip is not None),
        )

    def shape(self, shape: ImageShape) -> ImageShape:
        if shape.height < self.height or shape.width < self.width:
            raise ValueError(
                f"a crop of {self.height} x {self.width} does not fit into an image of {shape.height} x {shape.width}"
            )
        return ImageShape(shape.channels, self.height, self.width)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        remaining = iter(numbers)
        top, left = (
            next(remaining) if random else None for random in self._random_axes(ImageShape(*images.shape[1:]))
        )
        flipped = next(remaining) < self.flip if self.flip is not None else None
        cut = self.copies if images.device.type == "cpu" else self.gather
        return cut(images.contiguous(), top, left, flipped)

    def gather(self, images: Tensor, top: Column, left: Column, flipped: Column) -> Tensor:
        """In a few launches, without waiting for the device."""
        numbers = partial(constant, dtype=torch.int64, device=images.device)
        batch, channels = (numbers(range(count)) for count in images.shape[:2])
        rows, columns = numbers(range(self.height)).view(-1, 1), numbers(range(self.width))
        if flipped is not None:
            mirrored = numbers(range(self.width - 1, -1, -1))
            columns = torch.where(flipped.view(-1, 1, 1, 1), mirrored, columns)
        rows = rows if top is None else rows + top.view(-1, 1, 1, 1)
        columns = columns if left is None else columns + left.view(-1, 1, 1, 1)
        return images[batch.view(-1, 1, 1, 1), channels.view(-1, 1, 1), rows, columns]

    def copies(self, images: Tensor, top: Column, left: Column, flipped: Column) -> Tensor:
        """In long copies: on a CPU, twice as fast as a gather."""
        count, channels, height, width = images.shape
        sizes, strides = (1, channels, self.height, self.width), (0, height * width, width, 1)
        mirrored = images if flipped is None else images.flip(-1)
        corners = ([0] * count if column is None else column.tolist() for column in (top, left, flipped))
        views = []
        for row, (y, x, flip) in enumerate(zip(*corners, strict=True)):
            image, x = (mirrored, width - self.width - x) if flip else (images, x)
            offset = image.storage_offset() + row * channels * height * width + y * width + x
            views.append(image.as_strided(sizes, strides, offset))
        return torch.cat(views)


@dataclass(frozen=True)
class CenterPart(BatchOperation):
    """Crop the centre. A too small image is first padded with black."""

    height: int
    width: int

    def shape(self, shape: ImageShape) -> ImageShape:
        return ImageShape(shape.channels, self.height, self.width)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        height, width = images.shape[2:]
        if self.height > height or self.width > width:
            rows, columns = max(0, self.height - height), max(0, self.width - width)
            images = Pad(columns // 2, rows // 2, (columns + 1) // 2, (rows + 1) // 2)(images, numbers)
            height, width = images.shape[2:]
        top, left = round((height - self.height) / 2.0), round((width - self.width) / 2.0)
        return images[:, :, top : top + self.height, left : left + self.width]


@dataclass(frozen=True)
class ToTensor(BatchOperation):
    """Convert a PIL image or an array to a tensor with the same integer values."""

    tv: bool = False

    def form(self, form: ImageForm) -> ImageForm:
        return ImageForm("tensor", form.dtype, tv=self.tv)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        return images


@dataclass(frozen=True)
class Convert(BatchOperation):
    """Change the dtype without changing the values."""

    dtype: torch.dtype

    def form(self, form: ImageForm) -> ImageForm:
        return replace(form, dtype=self.dtype)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        return images.to(self.dtype)


def divide_in_place(tensor: Tensor, by: float) -> Tensor:
    """Divide a tensor of floats in place by a number.

    For a host number, CUDA multiplies by its reciprocal (BinaryDivTrueKernel.cu of torch 2.14): of the 256
    bytes divided by 255, 126 then differ in the last bit. By a tensor on the device, it divides.
    """
    return tensor.div_(constant(by, tensor.dtype, tensor.device))


@dataclass(frozen=True)
class ScaleBytes(BatchOperation):
    """Scale bytes to floats in [0, 1], by division (v1) or reciprocal (v2), which rounds differently."""

    dtype: torch.dtype
    divide: bool = True
    gain: float = 1.0 / 255

    def form(self, form: ImageForm) -> ImageForm:
        return replace(form, dtype=self.dtype)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        floats = images.to(self.dtype, memory_format=torch.contiguous_format)
        return divide_in_place(floats, 255) if self.divide else floats.mul_(1.0 / 255)


@dataclass(frozen=True)
class Normalize(BatchOperation):
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    @property
    def gain(self) -> float:  # type: ignore[override]
        return 1.0 / min(map(abs, self.deviation))

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        mean, deviation = (
            constant(values, images.dtype, images.device).view(-1, 1, 1)
            for values in (self.mean, self.deviation)
        )
        return images.sub(mean).div_(deviation)


def merge_adjacent(operations: Sequence[BatchOperation]) -> tuple[BatchOperation, ...]:
    """Merge adjacent operations where that is faster."""
    merged: list[BatchOperation] = []
    for operation in operations:
        last = merged[-1] if merged else None
        if (
            isinstance(last, Window)
            and last.flip is None
            and isinstance(operation, Flip)
            and operation.axis == -1
        ):
            merged[-1] = replace(last, flip=operation.p)
        else:
            merged.append(operation)
    return tuple(merged)
