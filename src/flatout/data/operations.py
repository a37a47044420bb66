"""Padding, crops, flips, float conversion and normalisation on a batch, bit for bit as in torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flatout.data.draws import Draw, Integer, Uniform
from flatout.data.operation import BatchOperation, ImageForm, ImageShape


@dataclass(frozen=True)
class Flip(BatchOperation):
    """Mirror about ``axis`` (-1 left and right, -2 top and bottom) with probability ``p``."""

    axis: int
    p: float

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        return (Uniform(),)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        flipped = images.flip(self.axis).unbind()
        chosen = (numbers[0] < self.p).tolist()
        return torch.stack(
            [
                mirrored if flip else image
                for image, mirrored, flip in zip(images.unbind(), flipped, chosen, strict=True)
            ]
        )


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
            rows = _positions(old.height, self.top, self.bottom, self.mode).to(images.device)
            columns = _positions(old.width, self.left, self.right, self.mode).to(images.device)
            return images.index_select(2, rows).index_select(3, columns)
        new = self.shape(old)
        if len(self.fill) == 1:
            padded = images.new_full((batch, *new), self.fill[0])
        else:
            padded = (
                torch.tensor(self.fill, dtype=images.dtype, device=images.device)
                .view(-1, 1, 1)
                .repeat(batch, 1, new.height, new.width)
            )
        padded[:, :, self.top : self.top + old.height, self.left : self.left + old.width] = images
        return padded


def _positions(length: int, before: int, after: int, mode: str) -> Tensor:
    source = torch.arange(-before, length + after)
    if mode == "edge" or length == 1:
        return source.clamp(0, length - 1)
    period = 2 * length - 2 if mode == "reflect" else 2 * length
    source = source % period
    return torch.where(source < length, source, period - source if mode == "reflect" else period - 1 - source)


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


@dataclass(frozen=True)
class Window(BatchOperation):
    """Crop a window of this size at a random position. An image of exactly this size draws nothing."""

    height: int
    width: int
    separate_axes: bool = False  # v2 draws for each axis separately, v1 for both or none

    def _random_axes(self, shape: ImageShape) -> tuple[bool, bool]:
        rows, columns = shape.height > self.height, shape.width > self.width
        return (rows, columns) if self.separate_axes else (rows or columns, rows or columns)

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        rows, columns = self._random_axes(shape)
        return (Integer(shape.height - self.height + 1),) * rows + (
            Integer(shape.width - self.width + 1),
        ) * columns

    def shape(self, shape: ImageShape) -> ImageShape:
        if shape.height < self.height or shape.width < self.width:
            raise ValueError(
                f"a crop of {self.height} x {self.width} does not fit into an image of {shape.height} x {shape.width}"
            )
        return ImageShape(shape.channels, self.height, self.width)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        images = images.contiguous()
        return self.cut([images] * len(images), *self.corners(images, numbers))

    def corners(self, images: Tensor, numbers: Sequence[Tensor]) -> tuple[list[int], list[int]]:
        """The top row and the left column of each window."""
        rows, columns = self._random_axes(ImageShape(*images.shape[1:]))
        columns_of_numbers = iter(numbers)
        zeros = [0] * len(images)
        return next(columns_of_numbers).tolist() if rows else zeros, next(
            columns_of_numbers
        ).tolist() if columns else zeros

    def cut(self, images: Sequence[Tensor], top: Sequence[int], left: Sequence[int]) -> Tensor:
        """Cut the window of ``images[i][i]`` at corner i. The tensors are contiguous and of one shape."""
        _, channels, height, width = images[0].shape
        sizes, strides = (1, channels, self.height, self.width), (0, height * width, width, 1)
        image_size = channels * height * width
        views = [
            image.as_strided(sizes, strides, image.storage_offset() + row * image_size + y * width + x)
            for row, (image, y, x) in enumerate(zip(images, top, left, strict=True))
        ]
        # twice as fast as gathering from an unfolded view: a few long copies per window
        return torch.cat(views)


@dataclass(frozen=True)
class FlippedWindow(BatchOperation):
    """Crop and then flip horizontally, by cropping from an image that is already flipped."""

    window: Window
    flip: Flip

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        return self.window.draws(shape) + self.flip.draws(shape)

    def shape(self, shape: ImageShape) -> ImageShape:
        return self.window.shape(shape)

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        images = images.contiguous()
        mirrored, chosen = images.flip(-1), (numbers[-1] < self.flip.p).tolist()
        top, left = self.window.corners(images, numbers[:-1])
        max_left = images.shape[-1] - self.window.width
        sources = [mirrored if flip else images for flip in chosen]
        return self.window.cut(
            sources, top, [max_left - x if flip else x for x, flip in zip(left, chosen, strict=True)]
        )


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
    """Divide a floating-point tensor in place by a number. Nothing else may use the tensor.

    For a host number, CUDA multiplies by its reciprocal (BinaryDivTrueKernel.cu of torch 2.14). Of the 256
    byte values divided by 255, 126 then differ from torchvision's CPU result in the last bit. With a tensor
    on the same device as divisor, CUDA divides.
    """
    return tensor.div_(torch.full((), by, dtype=tensor.dtype, device=tensor.device))


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
            torch.tensor(values, dtype=images.dtype, device=images.device).view(-1, 1, 1)
            for values in (self.mean, self.deviation)
        )
        return images.sub(mean).div_(deviation)


def merge_adjacent(operations: Sequence[BatchOperation]) -> tuple[BatchOperation, ...]:
    """Merge adjacent operations where that is faster."""
    merged: list[BatchOperation] = []
    for operation in operations:
        if isinstance(operation, Flip) and operation.axis == -1 and merged and isinstance(merged[-1], Window):
            merged[-1] = FlippedWindow(merged[-1], operation)
        else:
            merged.append(operation)
    return tuple(merged)
