"""Batch operations: the counterparts of transforms of single images.

Shapes: B batch, C channels, H height, W width. All images of a batch have one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.data.draws import Draw, NumberSource, Uniform, draw_columns


class ImageShape(NamedTuple):
    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class ImageForm:
    """The kind of an image at one point of a pipeline. Arithmetic differs between PIL images and tensors."""

    kind: str  # "pil", "numpy" or "tensor"
    dtype: torch.dtype = torch.uint8
    mode: str = ""  # mode of a PIL image: L, RGB, RGBA
    tv: bool = False  # whether it is a tv_tensors.Image, not a plain tensor


class NotBatchable(Exception):
    """Why a transform cannot run on a batch, as a sentence."""


class BatchOperation:
    """One transform of a batch. By default, it is deterministic and keeps shape and form.

    Values equal torchvision's for single images, bit for bit or within ``tolerance``. If an image takes a fixed
    count of random numbers, `draws` lists them, and ``numbers`` holds one column [B] per draw. If the count
    depends on the drawn values, `draws` returns None, `draw_row` draws for one image, and ``numbers`` is the list
    of its results.
    """

    tolerance: float = 0.0  # largest difference from torchvision, in the units of the result
    gain: float = 1.0  # factor by which it widens an earlier difference
    heavy: bool = False  # its arithmetic dominates: large images may be faster one by one

    def draws(self, shape: ImageShape) -> tuple[Draw, ...] | None:
        return ()

    def draw_row(self, shape: ImageShape, source: NumberSource) -> Any:
        """The numbers of one image of this shape, drawn in torchvision's order."""
        raise NotImplementedError

    def draw(self, shape: ImageShape, source: NumberSource) -> Any:
        """The numbers of one image, with or without listed draws."""
        kinds = self.draws(shape)
        return self.draw_row(shape, source) if kinds is None else tuple(source.draw(kind) for kind in kinds)

    def to_columns(self, shape: ImageShape, rows: Sequence[Any]) -> Sequence[Any]:
        """Convert the results of `draw` to the format of a call: columns if the draws are listed."""
        kinds = self.draws(shape)
        if kinds is None:
            return rows
        dtypes = [torch.float32 if isinstance(kind, Uniform) else torch.int64 for kind in kinds]
        return [torch.tensor([row[index] for row in rows], dtype=dtype) for index, dtype in enumerate(dtypes)]

    def shape(self, shape: ImageShape) -> ImageShape:
        """The shape of the result.

        Raises ValueError if torchvision would reject the image, NotBatchable if the results would differ in shape.
        """
        return shape

    def form(self, form: ImageForm) -> ImageForm:
        return form

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        """Transform images [B, C, H, W] of any strides, never in place.

        The result may share memory with them, or within itself.
        """
        raise NotImplementedError


def shape_after(operations: Sequence[BatchOperation], shape: ImageShape) -> ImageShape:
    """The shape after the operations. Raises ValueError if torchvision would reject the image."""
    for operation in operations:
        shape = operation.shape(shape)
    return shape


def draw_listed(
    calls: Sequence[tuple[Sequence[BatchOperation], ImageShape]], rows: int
) -> list[list[Sequence[Any]]] | None:
    """The columns of each operation of calls, or None if a count of numbers depends on drawn values."""
    listed: list[list[tuple[Draw, ...]]] = []
    for operations, shape in calls:
        listed.append([])
        for operation in operations:
            draws = operation.draws(shape)
            if draws is None:
                return None
            listed[-1].append(draws)
            shape = operation.shape(shape)
    columns = iter(draw_columns([kind for call in listed for draws in call for kind in draws], rows))
    return [[[next(columns) for _ in draws] for draws in call] for call in listed]


def draw_row(operations: Sequence[BatchOperation], shape: ImageShape, source: NumberSource) -> list[Any]:
    """The numbers of one image, with an entry for each operation."""
    numbers: list[Any] = []
    for operation in operations:
        numbers.append(operation.draw(shape, source))
        shape = operation.shape(shape)
    return numbers


def rows_to_columns(
    operations: Sequence[BatchOperation], rows: Sequence[list[Any]], shape: ImageShape
) -> list[Sequence[Any]]:
    """Convert rows of numbers to the operations' format: columns, except where the count is not fixed."""
    columns: list[Sequence[Any]] = []
    for index, operation in enumerate(operations):
        columns.append(operation.to_columns(shape, [row[index] for row in rows]))
        shape = operation.shape(shape)
    return columns


Reader = Callable[[Any, ImageForm], "BatchOperation | Sequence[BatchOperation]"]
"""Returns the operations of a torchvision transform for this form. Raises NotBatchable with the reason."""
