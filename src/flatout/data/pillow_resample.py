"""Pillow's resampling of bytes for a batch of images with one box each, bit for bit.

Pillow resamples along rows, rounds to bytes, resamples along columns and rounds again, or in the opposite
order. Its weights are integer multiples of 2**-22. Here, each weight is split into a high and a low part. The
sums of the parts are integers below 2**24, so float32 matrix products are exact in any order of addition.

Source: Pillow's Resample.c (precompute_coeffs, normalize_coeffs_8bpc, clip8) and, for nearest-neighbour
resampling, Geometry.c (ImagingScaleAffine).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_float
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

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
