"""Resize and RandomResizedCrop on a batch: PIL images bit for bit as Pillow, tensors as torchvision."""

from __future__ import annotations

import math
import platform
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import interpolate, pad

from flatout.data.draws import NumberSource
from flatout.data.operation import BatchOperation, ImageForm, ImageShape, NotBatchable, Reader

# Pillow's resampling of bytes for a batch of images with one box each, bit for bit.
#
# Pillow resamples along rows, rounds to bytes, resamples along columns and rounds again, or in the opposite
# order. Its weights are integer multiples of 2**-22. Here, each weight is split into a high and a low part. The
# sums of the parts are integers below 2**24, so float32 matrix products are exact in any order of addition.
#
# Source: Pillow's Resample.c (precompute_coeffs, normalize_coeffs_8bpc, clip8) and, for nearest-neighbour
# resampling, Geometry.c (ImagingScaleAffine).

BITS = 22  # PRECISION_BITS
LOW_UNIT = 2**11  # a weight is a multiple of this plus a remainder of at most half of it
MAX_FLOAT32_TAPS = (
    56  # taps whose remainders float32 sums exactly: 56 * 255 * 2**10 + 2**21 < 2**24; beyond, float64
)
BLOCK = 16  # adjacent results that share one window of the input
MAX_WINDOW_ELEMENTS = 2**20  # elements of a window tensor that fit into a cache


class CropBox(NamedTuple):
    top: int
    left: int
    height: int
    width: int


def _box(x: float) -> float:
    return 1.0 if -0.5 < x <= 0.5 else 0.0


def _bilinear(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _bicubic(x: float) -> float:
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * -0.5 if x < 2.0 else 0.0


def _hamming(x: float) -> float:
    x = abs(x)
    if x == 0.0:
        return 1.0
    if x >= 1.0:
        return 0.0
    x *= math.pi
    return math.sin(x) / x * (c_float(0.54).value + c_float(0.46).value * math.cos(x))


def _sinc(x: float) -> float:
    x *= math.pi
    return math.sin(x) / x if x else 1.0


def _lanczos(x: float) -> float:
    return _sinc(x) * _sinc(x / 3) if -3.0 <= x < 3.0 else 0.0


FILTERS: dict[str, tuple[Callable[[float], float], float]] = {  # with their support
    "box": (_box, 0.5),
    "bilinear": (_bilinear, 1.0),
    "hamming": (_hamming, 1.0),
    "bicubic": (_bicubic, 2.0),
    "lanczos": (_lanczos, 3.0),
}


@lru_cache(maxsize=2048)
def taps(name: str, length: int, size: int) -> tuple[Tensor, Tensor]:
    """How ``length`` pixels become ``size``.

    The result is the start of each window [size], and its weights in units of 2**-22 [size, reach].
    """
    weigh, support = FILTERS[name]
    scale = length / size
    stretch = max(scale, 1.0)
    support *= stretch
    inverse = 1.0 / stretch
    starts, rows = [], []
    for index in range(size):
        centre = (index + 0.5) * scale
        start, end = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), length)
        weights = [weigh((x - centre + 0.5) * inverse) for x in range(start, end)]
        total = 0.0
        for weight in weights:  # one at a time, as in C; sum() compensates for rounding
            total += weight
        if total:
            weights = [weight / total for weight in weights]
        starts.append(start)
        rows.append([int(weight * (1 << BITS) + math.copysign(0.5, weight)) for weight in weights])
    reach = max(map(len, rows))
    return torch.tensor(starts), torch.tensor([row + [0] * (reach - len(row)) for row in rows])


@lru_cache(maxsize=2048)
def nearest(length: int, size: int) -> Tensor:
    """The source index of each of ``size`` pixels. Pillow accumulates the step with its rounding."""
    scale = length / size
    position, indices = scale * 0.5, []
    for _ in range(size):
        indices.append(min(int(position), length - 1))
        position += scale
    return torch.tensor(indices)


def resample(
    images: Tensor, boxes: Sequence[CropBox], height: int, width: int, name: str, vertical_first: bool
) -> Tensor:
    """Resample byte images [B, C, H, W] with one box, or one per image. ``name`` is "nearest" or a filter.

    ``vertical_first`` says whether Pillow resamples columns first if they shrink by more than twice as many
    pixels as rows. It does from version 13 on (its pull request 9549).
    """
    batch, channels, rows, columns = images.shape
    pixels = images.permute(0, 2, 3, 1)
    resampled = images.new_empty((batch, height, width, channels))
    step = max(MAX_WINDOW_ELEMENTS // (2 * channels * max(rows, height) * max(columns, width)), 1)
    swapped = [vertical_first and box.height - height > max(2 * (box.width - width), 0) for box in boxes]
    for vertical in (False, True):
        chosen = [row for row in range(batch) if swapped[row if len(boxes) > 1 else 0] is vertical]
        for begin in range(0, len(chosen), step):
            chunk = chosen[begin : begin + step]
            chunk_boxes = [boxes[row] for row in chunk] if len(boxes) > 1 else list(boxes)
            if name == "nearest":
                source_rows = torch.stack([nearest(box.height, height) + box.top for box in chunk_boxes])
                source_columns = torch.stack([nearest(box.width, width) + box.left for box in chunk_boxes])
                resampled[chunk] = pixels[
                    torch.tensor(chunk).view(-1, 1, 1), source_rows.unsqueeze(2), source_columns.unsqueeze(1)
                ]
                continue
            top, bottom = (
                min(box.top for box in chunk_boxes),
                max(box.top + box.height for box in chunk_boxes),
            )
            chunk_pixels = pixels[chunk, top:bottom]
            vertical_args = (
                name,
                height,
                [box.height for box in chunk_boxes],
                [box.top - top for box in chunk_boxes],
            )
            horizontal_args = (
                name,
                width,
                [box.width for box in chunk_boxes],
                [box.left for box in chunk_boxes],
            )
            resampled[chunk] = (
                _resample_horizontal(_resample_vertical(chunk_pixels, *vertical_args), *horizontal_args)
                if vertical
                else _resample_vertical(_resample_horizontal(chunk_pixels, *horizontal_args), *vertical_args)
            )
    return resampled.permute(0, 3, 1, 2)


def _resample_vertical(
    pixels: Tensor, name: str, size: int, lengths: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Resample bytes [B, H, W, C] to [B, size, W, C] from ``lengths`` lines after ``offsets``."""
    return _resample_lines(pixels.flatten(2), name, size, lengths, offsets).unflatten(2, pixels.shape[2:])


def _resample_horizontal(
    pixels: Tensor, name: str, size: int, lengths: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    return _resample_vertical(pixels.transpose(1, 2), name, size, lengths, offsets).transpose(1, 2)


def _resample_lines(
    lines: Tensor, name: str, size: int, lengths: Sequence[int], offsets: Sequence[int]
) -> Tensor:
    """Resample [B, N, M] to [B, size, M].

    A block of results shares one window of lines, and is the product of a small matrix with them.
    """
    distinct = sorted(set(lengths))
    first, bands = _bands(name, size, tuple(distinct))
    band_of = torch.tensor([distinct.index(length) for length in lengths])
    batch, count, breadth = lines.shape
    blocks, window = bands.shape[1], bands.shape[3]
    source = (first[band_of] + torch.tensor(offsets).unsqueeze(1)).unsqueeze(2) + torch.arange(window)
    source = source.clamp_(max=count - 1) + torch.arange(batch).mul_(count).view(-1, 1, 1)
    windows = (
        lines.reshape(batch * count, breadth)
        .index_select(0, source.flatten())
        .to(bands.dtype)
        .view(batch, blocks, window, breadth)
    )
    sums = torch.matmul(bands[band_of], windows).view(batch, blocks, 2, -1, breadth)
    high, low = sums.unbind(2)
    low.add_(1 << (BITS - 1)).mul_(1 / LOW_UNIT).floor_()
    return (
        high.add_(low)
        .mul_(LOW_UNIT / 2**BITS)
        .floor_()
        .clamp_(0, 255)
        .to(torch.uint8)
        .flatten(1, 2)[:, :size]
    )


def _bands(name: str, size: int, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return window starts and block matrices per length: high parts of the weights above low parts."""
    all_taps = [taps(name, length, size) for length in lengths]
    reach = max(weights.shape[1] for _, weights in all_taps)
    block = min(BLOCK, size)
    padding = -size % block
    starts = torch.stack([torch.cat((start, start[-1:].expand(padding))) for start, _ in all_taps]).view(
        len(all_taps), -1, block
    )
    weights = torch.stack(
        [pad(weights, (0, reach - weights.shape[1], 0, padding)) for _, weights in all_taps]
    )
    first = starts[:, :, 0]
    offsets = (starts - first.unsqueeze(2)).unsqueeze(3) + torch.arange(reach)
    high = weights.add(LOW_UNIT // 2).div_(LOW_UNIT, rounding_mode="floor")
    split = (
        torch.stack((high, weights - high * LOW_UNIT), dim=1)
        .view(len(all_taps), 2, *offsets.shape[1:])
        .transpose(1, 2)
    )
    bands = torch.zeros(
        (*split.shape[:4], int(offsets.max()) + 1),
        dtype=torch.float32 if reach <= MAX_FLOAT32_TAPS else torch.float64,
    )
    bands.scatter_(4, offsets.unsqueeze(2).expand(split.shape), split.to(bands.dtype))
    return first, bands.flatten(2, 3)


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
