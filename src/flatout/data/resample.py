"""Resize and RandomResizedCrop on a batch: PIL images bit for bit as Pillow, tensors as torchvision."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import interpolate

from flatout.data.draws import NumberSource
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, Reader
from flatout.data.pillow_resample import FILTERS, CropBox, resample

MAX_TRIES = 10
# in the order of Pillow's constants
PILLOW_FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


class Resampler(Protocol):
    def __call__(self, images: Tensor, boxes: Sequence[CropBox], height: int, width: int) -> Tensor:
        """Resample [B, C, H, W] to [B, C, height, width], with one box per image or one for all."""


@dataclass(frozen=True)
class PillowResampler:
    name: str
    vertical_first: bool

    def __call__(self, images: Tensor, boxes: Sequence[CropBox], height: int, width: int) -> Tensor:
        return resample(images, boxes, height, width, self.name, self.vertical_first)


@dataclass(frozen=True)
class TensorResampler:
    """Resampling as in torchvision. With ``bytes_as_floats``, it converts bytes to floats and back.

    Images with equal boxes are resampled together.
    """

    mode: str
    antialias: bool
    bytes_as_floats: bool

    def __call__(self, images: Tensor, boxes: Sequence[CropBox], height: int, width: int) -> Tensor:
        if len(set(boxes)) == 1:
            return self._resized(images, boxes[0], height, width)
        return torch.cat(
            [self._resized(images[row : row + 1], box, height, width) for row, box in enumerate(boxes)]
        )

    def _resized(self, images: Tensor, box: CropBox, height: int, width: int) -> Tensor:
        images = images[:, :, box.top : box.top + box.height, box.left : box.left + box.width]
        if (box.height, box.width) == (height, width):
            return images
        align_corners = False if self.mode in ("bilinear", "bicubic") else None
        converted = images.to(
            torch.float32 if self.bytes_as_floats else images.dtype, memory_format=torch.contiguous_format
        ).contiguous()
        resized = interpolate(
            converted,
            size=(height, width),
            mode=self.mode,
            align_corners=align_corners,
            antialias=self.antialias,
        )
        if not self.bytes_as_floats:
            return resized
        return (resized.clamp_(0, 255) if self.mode == "bicubic" else resized).round_().to(torch.uint8)


@dataclass(frozen=True)
class Resize(BatchOperation):
    """Resize to a height and width, to a shorter side, or to a longer side.

    A shorter side may come with a limit for the longer one.
    """

    heavy: ClassVar[bool] = True  # type: ignore[misc]
    resampler: Resampler
    size: tuple[int, ...] | None
    longest: int | None = None

    def shape(self, shape: ImageShape) -> ImageShape:
        if self.size is not None and len(self.size) == 2:
            return ImageShape(shape.channels, *self.size)
        short, long = sorted(shape[1:])
        if self.size is None:
            assert self.longest is not None
            new_short, new_long = int(self.longest * short / long), self.longest
        else:
            new_short, new_long = self.size[0], int(self.size[0] * long / short)
            if self.longest is not None and self.longest <= new_short:
                raise ValueError(
                    f"the limit of the longer side, {self.longest}, must exceed the shorter side, {new_short}"
                )
            if self.longest is not None and new_long > self.longest:
                new_short, new_long = int(self.longest * new_short / new_long), self.longest
        height, width = (new_long, new_short) if shape.width <= shape.height else (new_short, new_long)
        return ImageShape(shape.channels, height, width)

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        old = ImageShape(*images.shape[1:])
        new = self.shape(old)
        return (
            images
            if new == old
            else self.resampler(images, [CropBox(0, 0, old.height, old.width)], new.height, new.width)
        )


@dataclass(frozen=True)
class ResizedCrop(BatchOperation):
    """Resize a box with random area and aspect ratio to a fixed size. ``numbers`` holds boxes."""

    heavy: ClassVar[bool] = True  # type: ignore[misc]
    resampler: Resampler
    height: int
    width: int
    scale: tuple[float, float]
    ratio: tuple[float, float]

    def shape(self, shape: ImageShape) -> ImageShape:
        return ImageShape(shape.channels, self.height, self.width)

    def draws(self, shape: ImageShape) -> None:
        return None

    def draw_row(self, shape: ImageShape, source: NumberSource) -> CropBox:
        _, height, width = shape
        for area, aspect in areas(source, self.scale, self.ratio, height * width):
            crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < crop_width <= width and 0 < crop_height <= height:
                top = source.randint(0, height - crop_height + 1)
                return CropBox(top, source.randint(0, width - crop_width + 1), crop_height, crop_width)
        crop_width, crop_height = width, height
        if width / height < min(self.ratio):
            crop_height = round(width / min(self.ratio))
        elif width / height > max(self.ratio):
            crop_width = round(height * max(self.ratio))
        return CropBox((height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width)

    def __call__(self, images: Tensor, numbers: Sequence[Any]) -> Tensor:
        return self.resampler(images, numbers, self.height, self.width)


def areas(
    source: NumberSource, scale: Sequence[float], ratio: Sequence[float], image_area: int
) -> Iterator[tuple[float, float]]:
    """Yield up to ten areas and aspect ratios, drawn on demand, with torch's rounding of log and exp."""
    low, high = _logarithms(tuple(ratio))
    aspect = torch.empty(1)
    for _ in range(MAX_TRIES):
        area = image_area * source.uniform(scale[0], scale[1])
        yield area, aspect.fill_(source.uniform(low, high)).exp_().item()


@lru_cache
def _logarithms(ratio: tuple[float, ...]) -> list[float]:
    return torch.log(torch.tensor(ratio)).tolist()


def interpolation_of(transform: Module) -> str:
    """The name of a transform's interpolation, from a name, an enum or a number."""
    interpolation = getattr(transform.interpolation, "value", transform.interpolation)
    return PILLOW_FILTERS[interpolation] if isinstance(interpolation, int) else str(interpolation)


def _resampler(transform: Module, form: ImageForm, v2: bool) -> Resampler:
    name = interpolation_of(transform)
    if form.kind == "pil" and form.mode in ("L", "RGB"):
        name = "nearest" if name == "nearest-exact" else name
        if name == "nearest" or name in FILTERS:
            return PillowResampler(name, _pillow_version() >= 13)
    smooth = name in ("bilinear", "bicubic")
    if (
        form.kind == "tensor"
        and form.dtype in (torch.uint8, torch.float32)
        and (smooth or name in ("nearest", "nearest-exact"))
    ):
        floats = form.dtype == torch.uint8 and (
            not v2 or (name == "bilinear" and not _resizes_bytes_directly())
        )
        return TensorResampler(name, smooth and bool(transform.antialias), floats)
    raise NotBatchable(
        f"{form.mode or form.dtype} images ({form.kind}) are not resampled in batches with the {name} filter"
    )


def _pillow_version() -> int:
    version = getattr(sys.modules.get("PIL"), "__version__", "none")
    # pillow-simd has versions such as 9.5.0.post2, and different arithmetic
    if not re.fullmatch(r"\d+(\.\d+)*", version):
        raise NotBatchable(f"flatout does not know how Pillow {version} resamples")
    return int(version.split(".")[0])


def _resizes_bytes_directly() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") or platform.machine() in (
        "aarch64",
        "arm64",
    )


def _resize(v2: bool, transform: Module, form: ImageForm) -> BatchOperation:
    size = transform.size
    size = (size,) if isinstance(size, int) else size and tuple(size)
    return Resize(_resampler(transform, form, v2), size, transform.max_size)


def _resized_crop(v2: bool, transform: Module, form: ImageForm) -> BatchOperation:
    height, width = transform.size if len(transform.size) == 2 else transform.size * 2
    return ResizedCrop(
        _resampler(transform, form, v2), height, width, tuple(transform.scale), tuple(transform.ratio)
    )


READERS: dict[str, Reader] = {
    f"v{1 + v2}.{name}": partial(read, v2)
    for name, read in (("Resize", _resize), ("RandomResizedCrop", _resized_crop))
    for v2 in (False, True)
}
