"""What a transform of one image becomes for a batch of them.

Shapes: B batch, C channels, H height, W width. Images of a batch have one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatout.pipeline.draws import Draw, Numbers, Uniform


class Shape(NamedTuple):
    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class Form:
    """What an image is at one point of a pipeline: the same transform does other arithmetic to a PIL image than to a tensor."""

    kind: str  # "pil", "numpy" or "tensor"
    dtype: torch.dtype = torch.uint8
    mode: str = ""  # of a PIL image: L, RGB, RGBA
    tv: bool = False  # a tv_tensors.Image rather than a plain tensor


class Unknown(Exception):
    """Why a transform cannot be done to a batch: a sentence."""


class Operation:
    """One transform, done to a batch. Deterministic and keeping shape and form, unless it says otherwise.

    Values are those of torchvision image by image: bit for bit, or within ``apart`` where it says so. Where the count of random numbers
    an image takes is known before, `draws` lists them and ``numbers`` are columns [B], one a draw; where it depends on what is drawn,
    `draws` answers None, `row` draws for one image, and ``numbers`` is the list of what it answered, one a row.
    """

    apart: float = 0.0  # the farthest a value may be from torchvision's, in the units of what comes out
    gain: float = 1.0  # by how much it widens a distance that was there before
    heavy: bool = False  # its arithmetic counts for more than its calls: large images may be faster one by one

    def draws(self, shape: Shape) -> tuple[Draw, ...] | None:
        return ()

    def row(self, shape: Shape, words: Numbers) -> Any:
        """The numbers of one image of this shape, drawn in torchvision's order."""
        raise NotImplementedError

    def drawn(self, shape: Shape, words: Numbers) -> Any:
        """The numbers of one image, whether they are listed or not."""
        kinds = self.draws(shape)
        return self.row(shape, words) if kinds is None else tuple(words.draw(kind) for kind in kinds)

    def together(self, shape: Shape, rows: Sequence[Any]) -> Sequence[Any]:
        """What `drawn` answered for each image, as a call expects it: columns where the draws are listed."""
        kinds = self.draws(shape)
        if kinds is None:
            return rows
        dtypes = [torch.float32 if isinstance(kind, Uniform) else torch.int64 for kind in kinds]
        return [torch.tensor([row[at] for row in rows], dtype=dtype) for at, dtype in enumerate(dtypes)]

    def shape(self, shape: Shape) -> Shape:
        """Of what comes out. Raises ValueError where torchvision would refuse the image, Unknown where images would differ in shape."""
        return shape

    def form(self, form: Form) -> Form:
        return form

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        """images [B, C, H, W] of any strides; never changed in place. The answer may share memory, with them or in itself."""
        raise NotImplementedError


def shape_after(operations: Sequence[Operation], shape: Shape) -> Shape:
    """Of what the operations make of an image of this shape. Raises ValueError where torchvision would reject the image."""
    for operation in operations:
        shape = operation.shape(shape)
    return shape


def listed_draws(operations: Sequence[Operation], shape: Shape) -> list[tuple[Draw, ...]] | None:
    """The draws of each operation for an image of this shape; None where their count depends on what is drawn."""
    found = []
    for operation in operations:
        draws = operation.draws(shape)
        if draws is None:
            return None
        found.append(draws)
        shape = operation.shape(shape)
    return found


def row_of(operations: Sequence[Operation], shape: Shape, words: Numbers) -> list[Any]:
    """The numbers of one image, an entry for each operation."""
    found: list[Any] = []
    for operation in operations:
        found.append(operation.drawn(shape, words))
        shape = operation.shape(shape)
    return found


def rows_together(operations: Sequence[Operation], rows: Sequence[list[Any]], shape: Shape) -> list[Sequence[Any]]:
    """Rows of numbers as the operations expect them: columns, but for those whose count is not known before."""
    found: list[Sequence[Any]] = []
    for at, operation in enumerate(operations):
        found.append(operation.together(shape, [row[at] for row in rows]))
        shape = operation.shape(shape)
    return found


Reader = Callable[[Any, Form], "Operation | Sequence[Operation]"]
"""Reads a transform object of torchvision: what it becomes for images of this form. Raises Unknown with the reason where nothing."""
