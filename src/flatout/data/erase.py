"""RandomErasing on a batch, bit for bit: boxes are drawn for each image and filled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from flatout.data.choose import single
from flatout.data.draws import Numbers
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, Reader
from flatout.data.resample import areas


class Erased(NamedTuple):
    top: int
    left: int
    height: int
    width: int
    value: Tensor  # [C or 1, height or 1, width or 1]


@dataclass(frozen=True)
class Erase(BatchOperation):
    """Fill a box with ``value`` (one number, or one per channel), or with normal noise if it is None.

    ``numbers`` holds one box per image, or None for an unchanged image.
    """

    p: float
    scale: tuple[float, float]
    ratio: tuple[float, float]
    value: tuple[float, ...] | None

    def shape(self, shape: ImageShape) -> ImageShape:
        if self.value is not None and len(self.value) not in (1, shape.channels):
            raise ValueError(
                f"RandomErasing has {len(self.value)} values, but the images have {shape.channels} channels"
            )
        return shape

    def draws(self, shape: ImageShape) -> None:
        return None

    def row(self, shape: ImageShape, words: Numbers) -> Erased | None:
        if words.rand() >= self.p:
            return None
        channels, height, width = shape
        for area, aspect in areas(words, self.scale, self.ratio, height * width):
            high, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if high < height and wide < width:
                noisy = self.value is None
                value = (
                    torch.empty((channels, high, wide)).normal_(generator=words.torch())
                    if noisy
                    else torch.tensor(self.value).view(-1, 1, 1)
                )
                top = words.randint(0, height - high + 1)
                return Erased(top, words.randint(0, width - wide + 1), high, wide, value)
        return None

    def __call__(self, images: Tensor, numbers: Sequence[Erased | None]) -> Tensor:
        erased = images.clone()
        for image, box in zip(erased, numbers, strict=True):
            if box is not None:
                image[:, box.top : box.top + box.height, box.left : box.left + box.width] = box.value
        return erased


def _reader(v2: bool) -> Reader:
    def read(transform: Module, form: ImageForm) -> BatchOperation:
        if not (
            (form.kind == "tensor" and form.dtype in (torch.uint8, torch.float32))
            or (v2 and form.kind == "pil" and form.mode in ("L", "RGB"))
        ):
            raise NotBatchable(
                f"RandomErasing does not run in batches on {form.mode or form.dtype} images ({form.kind})"
            )
        if transform.inplace:
            raise NotBatchable(
                "RandomErasing in place may change the images of the data set itself in every epoch"
            )
        given = transform.value
        value = (
            None
            if given is None or isinstance(given, str)
            else tuple(map(float, given if isinstance(given, (tuple, list)) else [given]))
        )
        if form.dtype == torch.uint8 and (value is None or not all(0 <= each <= 255 for each in value)):
            raise NotBatchable(
                "RandomErasing fills bytes with a value outside 0 to 255, which differs between machines"
            )
        return Erase(single(transform.p), tuple(transform.scale), tuple(transform.ratio), value)

    return read


READERS: dict[str, Reader] = {"v1.RandomErasing": _reader(False), "v2.RandomErasing": _reader(True)}
