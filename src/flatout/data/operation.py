"""Batch operations: the counterparts of transforms of single images.

Shapes: B batch, C channels, H height, W width. All images of a batch have one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.data.draws import Draw


class ImageShape(NamedTuple):
    channels: int
    height: int
    width: int


LARGE = ImageShape(3, 2**14, 2**14)  # large enough that every transform that can draw does draw


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

    Values equal torchvision's for single images, bit for bit. `draws` lists the random numbers that an image
    takes, in torchvision's order.
    """

    def draws(self, shape: ImageShape) -> tuple[Draw, ...]:
        return ()

    def shape(self, shape: ImageShape) -> ImageShape:
        """Return the shape of the result.

        Raises ValueError if torchvision would reject the image.
        """
        return shape

    def form(self, form: ImageForm) -> ImageForm:
        return form

    def __call__(self, images: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        """Transform images [B, C, H, W] of any strides, never in place. ``numbers``: one column [B] per draw.

        The result may share memory with them, or within itself.
        """
        raise NotImplementedError


def shape_after(operations: Sequence[BatchOperation], shape: ImageShape) -> ImageShape:
    """Return the shape after the operations. Raises ValueError if torchvision would reject the image."""
    for operation in operations:
        shape = operation.shape(shape)
    return shape


def listed_draws(operations: Sequence[BatchOperation], shape: ImageShape) -> list[tuple[Draw, ...]]:
    """Return the draws of each operation."""
    draws = []
    for operation in operations:
        draws.append(operation.draws(shape))
        shape = operation.shape(shape)
    return draws


Reader = Callable[[Any, ImageForm], "BatchOperation | Sequence[BatchOperation]"]
"""Returns the operations of a torchvision transform for this form. Raises NotBatchable with the reason."""
