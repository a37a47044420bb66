"""Pillow's resampling of bytes, for a batch of images with a box each. Bit for bit.

Pillow resamples along rows, rounds to bytes, resamples along columns and rounds again (or the other way about). Its weights are whole numbers of 2**-22, so a sum
is a whole number below 2**53 that float64 matrix products find without rounding, in whatever order they add.

Source: Pillow's Resample.c (precompute_coeffs, normalize_coeffs_8bpc, clip8) and, for the nearest neighbour, Geometry.c (ImagingScaleAffine).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import c_float
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

BITS = 22  # PRECISION_BITS
BLOCK = 16  # neighbouring results that share one window of the input
AT_ONCE = 2**20  # numbers of a window tensor: what a cache holds


class Box(NamedTuple):
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


FILTERS: dict[str, tuple[Callable[[float], float], float]] = {  # with how far they reach
    "box": (_box, 0.5), "bilinear": (_bilinear, 1.0), "hamming": (_hamming, 1.0), "bicubic": (_bicubic, 2.0), "lanczos": (_lanczos, 3.0)}


@lru_cache(maxsize=2048)
def taps(name: str, length: int, size: int) -> tuple[Tensor, Tensor]:
    """How ``length`` pixels become ``size``: where each one's window begins [size], and its weights in units of 2**-22 [size, reach]."""
    weigh, support = FILTERS[name]
    scale = length / size
    stretch = max(scale, 1.0)
    support *= stretch
    inverse = 1.0 / stretch
    starts, rows = [], []
    for at in range(size):
        centre = (at + 0.5) * scale
        start, end = max(int(centre - support + 0.5), 0), min(int(centre + support + 0.5), length)
        weights = [weigh((x - centre + 0.5) * inverse) for x in range(start, end)]
        total = 0.0
        for weight in weights:  # one after another, as C does; sum() compensates
            total += weight
        if total:
            weights = [weight / total for weight in weights]
        starts.append(start)
        rows.append([int(weight * (1 << BITS) + math.copysign(0.5, weight)) for weight in weights])
    reach = max(map(len, rows))
    return torch.tensor(starts), torch.tensor([row + [0] * (reach - len(row)) for row in rows], dtype=torch.float64)


@lru_cache(maxsize=2048)
def nearest(length: int, size: int) -> Tensor:
    """Which of ``length`` pixels each of ``size`` takes; Pillow adds the step up, and so its rounding."""
    scale = length / size
    at, found = scale * 0.5, []
    for _ in range(size):
        found.append(min(int(at), length - 1))
        at += scale
    return torch.tensor(found)


def resample(images: Tensor, boxes: Sequence[Box], height: int, width: int, name: str, tall_first: bool) -> Tensor:
    """images [B, C, H, W] of bytes; one box an image, or one for all. ``name`` is "nearest" or one of the filters.

    ``tall_first``: whether Pillow resamples columns first where they shrink by more than twice as many pixels as rows do; it does from
    version 13 on (its pull request 9549).
    """
    batch, channels, rows, columns = images.shape
    pixels = images.permute(0, 2, 3, 1)
    resampled = images.new_empty((batch, height, width, channels))
    step = max(AT_ONCE // (2 * channels * max(rows, height) * max(columns, width)), 1)
    upright = [tall_first and box.height - height > max(2 * (box.width - width), 0) for box in boxes]
    for way in (False, True):
        chosen = [row for row in range(batch) if upright[row if len(boxes) > 1 else 0] is way]
        for begin in range(0, len(chosen), step):
            here = chosen[begin:begin + step]
            theirs = [boxes[row] for row in here] if len(boxes) > 1 else list(boxes)
            if name == "nearest":
                down = torch.stack([nearest(box.height, height) + box.top for box in theirs])
                along = torch.stack([nearest(box.width, width) + box.left for box in theirs])
                resampled[here] = pixels[torch.tensor(here).view(-1, 1, 1), down.unsqueeze(2), along.unsqueeze(1)]
                continue
            top, bottom = min(box.top for box in theirs), max(box.top + box.height for box in theirs)
            down_by = [taps(name, box.height, height) for box in theirs], [box.top - top for box in theirs]
            along_by = [taps(name, box.width, width) for box in theirs], [box.left for box in theirs]
            part = pixels[here, top:bottom].double()
            part = _across(_down(part, *down_by), *along_by) if way else _down(_across(part, *along_by), *down_by)
            resampled[here] = part.to(torch.uint8)
    return resampled.permute(0, 3, 1, 2)


Taps = Sequence[tuple[Tensor, Tensor]]


def _down(pixels: Tensor, each: Taps, offsets: Sequence[int]) -> Tensor:
    """[B, H, W, C] to [B, height, W, C]."""
    return _along(pixels.flatten(2), each, offsets).unflatten(2, pixels.shape[2:])


def _across(pixels: Tensor, each: Taps, offsets: Sequence[int]) -> Tensor:
    """[B, H, W, C] to [B, H, width, C]."""
    return _down(pixels.transpose(1, 2), each, offsets).transpose(1, 2)


def _along(lines: Tensor, each: Taps, offsets: Sequence[int]) -> Tensor:
    """[B, N, M] to [B, size, M]: a weighted sum of lines for each result, rounded and clipped to a byte. Weights for each row, or for all.

    A block of results has its window of lines in common, and is one product of a small matrix with them.
    """
    reach = max(weights.shape[1] for _, weights in each)
    starts = torch.stack([start for start, _ in each]) + torch.tensor(offsets).unsqueeze(1)
    weights = torch.stack([torch.nn.functional.pad(weights, (0, reach - weights.shape[1])) for _, weights in each])
    size = starts.shape[1]
    block = min(BLOCK, size)
    blocks = -(-size // block)
    starts = torch.cat((starts, starts[:, -1:].expand(-1, blocks * block - size)), dim=1).view(-1, blocks, block)
    weights = torch.nn.functional.pad(weights, (0, 0, 0, blocks * block - size)).view(-1, blocks, block, reach)
    first = starts[:, :, :1]
    inside = (starts - first).unsqueeze(3) + torch.arange(reach)
    window = int(inside.max()) + 1
    bands = weights.new_zeros((*starts.shape, window)).scatter_(3, inside, weights)
    at = (first + torch.arange(window)).clamp_(max=lines.shape[1] - 1)
    windows = lines[torch.arange(len(lines)).view(-1, 1, 1), at]
    sums = torch.matmul(bands, windows).flatten(1, 2)[:, :size]
    return sums.add_(1 << (BITS - 1)).mul_(2.0**-BITS).floor_().clamp_(0, 255)
