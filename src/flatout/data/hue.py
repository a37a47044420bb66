"""Hue rotation for a batch of images, one rotation per image: Pillow's for bytes, torchvision's for tensors.

Images are float32 [B, 3, H, W]; byte images hold whole numbers. ``turns`` [B] are fractions of the circle,
-0.5 to 0.5.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.data.operations import divide_in_place

# For red, green and blue: which of value, middle and lowest (0, 1, 2) it is in each sixth of the circle.
LEVEL_OF_CHANNEL = ((0, 1, 2, 2, 1, 0), (1, 0, 0, 1, 2, 2), (2, 2, 1, 0, 0, 1))


class _Tables(NamedTuple):
    hue: Tensor  # [3 * 256 * 256] by the highest channel and the two distances below it, the increasing one first
    saturation: (
        Tensor  # [256 * 256] by the highest channel and the spread: a fraction, rounded through a byte
    )
    lowest: Tensor  # [256 * 256] with the same index: the lowest channel of the result
    fraction: Tensor  # [256] by the hue: the position in its sixth, from the end in every other one
    single_precision: Tensor  # [256] by the hue: whether C multiplies by it in single precision
    channel_levels: Tensor  # [3, 256] by the hue: which of value, middle and lowest each channel takes


@cache
def _tables() -> _Tables:
    """Return tables for Pillow's Convert.c, rgb2hsv_row and hsv2rgb, with C's promotions to double."""
    steps = torch.arange(256, dtype=torch.float32)
    up, down = steps[:, None], steps
    spread = torch.maximum(up, down).clamp(min=1)
    up, down = up / spread, down / spread
    branches = [
        up - down,
        (2.0 + up.double() - down.double()).float(),
        (4.0 + up.double() - down.double()).float(),
    ]
    circle = torch.stack(branches).double().div(6.0).add(1.0).fmod(1.0).float()
    hue = circle.double().mul(255.0).int().flatten()

    highest, spread = steps[:, None], steps
    saturation = (
        (spread / highest.clamp(min=1)).double().mul(255.0).floor().clamp(max=255).div(255.0).float().double()
    )
    lowest = ((1.0 - saturation) * highest.double() + 0.5).floor().float()

    sixths = steps.double() * 6.0 / 255.0
    sector = sixths.floor()
    fraction = (sixths - sector).float().double()
    sector = sector.long() % 6  # a hue of 255 is the full circle
    single_precision = sector % 2 == 1
    return _Tables(
        hue,
        saturation.flatten(),
        lowest.flatten(),
        torch.where(single_precision, fraction, 1.0 - fraction),
        single_precision,
        torch.tensor(LEVEL_OF_CHANNEL)[:, sector],
    )


def rotate_byte_hue(images: Tensor, turns: Tensor) -> Tensor:
    """Convert to HSV bytes, add to the hue byte with wrap-around, and convert back, bit for bit as Pillow."""
    tables = _tables()
    highest, below = images.amax(1), images.amax(1, keepdim=True) - images
    spread = below.amax(1)
    red, green, blue = below.unbind(1)
    is_red, is_green = red == 0, green == 0
    up = torch.where(is_red, blue, torch.where(is_green, red, green))
    down = torch.where(is_red, green, torch.where(is_green, blue, red))
    branch = torch.where(is_red, 0.0, torch.where(is_green, 65536.0, 131072.0))
    steps = (turns.double() * 255).int().view(-1, 1, 1)  # towards zero, as numpy.int32 does
    hue = (_lookup(tables.hue, up.mul_(256).add_(down).add_(branch)) + steps) & 255
    index = highest * 256 + spread
    product = _lookup(tables.saturation, index) * _lookup(tables.fraction, hue)
    product = torch.where(_lookup(tables.single_precision, hue), product.float().double(), product)
    middle = (1.0 - product).mul_(highest).add_(0.5).floor_().float()
    levels = torch.stack((highest, middle, _lookup(tables.lowest, index)), dim=1)
    return levels.gather(1, tables.channel_levels[:, hue.long()].transpose(0, 1))


def _lookup(table: Tensor, index: Tensor) -> Tensor:
    return table.index_select(0, index.flatten().int()).view(index.shape)


def rotate_hue(images: Tensor, turns: Tensor, v2: bool) -> Tensor:
    """Rotate the hue of images in [0, 1]. v2 multiplies by reciprocals and adds in a different order."""
    lowest, highest = torch.aminmax(images, dim=1)
    grey = highest == lowest
    spread = highest - lowest
    saturation = spread / torch.where(grey, 1.0, highest)
    red, green, blue = ((highest.unsqueeze(1) - images) / torch.where(grey, 1.0, spread).unsqueeze(1)).unbind(
        1
    )
    is_red, is_green = images[:, 0] == highest, images[:, 1] == highest
    hue = torch.where(is_red, blue - green, torch.where(is_green, red + 2.0 - blue, green + 4.0 - red))
    hue = hue.mul_(1.0 / 6.0) if v2 else divide_in_place(hue, 6)
    hue = hue.add_(1.0).fmod_(1.0).add_(turns.view(-1, 1, 1)).remainder_(1.0).mul_(6)
    sector = hue.floor()
    fraction = hue - sector
    if v2:
        product, rest = saturation * fraction, 1.0 - saturation
        falling, rising = (1.0 - product) * highest, (product + rest) * highest
    else:
        rest = 1.0 - saturation
        falling, rising = (
            highest * (1.0 - saturation * fraction),
            highest * (1.0 - saturation * (1.0 - fraction)),
        )
    sector = sector.long() % 6
    middle = torch.where(sector % 2 == 1, falling, rising).clamp_(0.0, 1.0)
    levels = torch.stack((highest, middle, (rest * highest).clamp_(0.0, 1.0)), dim=1)
    return levels.gather(1, torch.tensor(LEVEL_OF_CHANNEL)[:, sector].transpose(0, 1))
