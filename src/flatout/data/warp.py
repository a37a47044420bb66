"""Affine warps with one map per image, as Pillow does for bytes and torchvision for tensors, bit for bit.

``maps`` [B, 6], in float64, lead from a position in the result to one in the image: x' = ax + by + c, y' = dx
+ ey + f.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

FARTHEST = 32768.0  # the limit of 16.16 fixed point


class Warp(Protocol):
    def __call__(self, images: Tensor, maps: Tensor) -> Tensor:
        """Warp [B, C, H, W] to the same shape."""


@dataclass(frozen=True)
class PillowWarp:
    """Pillow's Geometry.c: nearest in fixed point (or with accumulated steps), bilinear in double precision.

    ``fill`` has one number per channel, or one for all. Sums are rounded after each product, as in C without
    contraction.
    """

    bilinear: bool
    fill: tuple[int, ...]

    def __call__(self, images: Tensor, maps: Tensor) -> Tensor:
        fill = torch.tensor(self.fill, dtype=images.dtype).view(-1, 1, 1)
        looked_up, inside = (self._between if self.bilinear else self._nearest)(images, maps)
        return torch.where(inside.unsqueeze(1), looked_up, fill)

    def _nearest(self, images: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
        height, width = images.shape[2:]
        if bool(_holds_fixed(maps, height, width).all()):
            x, y = _fixed(maps, height, width)
        else:
            fixed = _holds_fixed(maps, height, width).view(-1, 1, 1)
            x, y = (
                torch.where(fixed, exact, added)
                for exact, added in zip(_fixed(maps, height, width), _added(maps, height, width), strict=True)
            )
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        return _at(images, x, y), inside

    def _between(self, images: Tensor, maps: Tensor) -> tuple[Tensor, Tensor]:
        height, width = images.shape[2:]
        columns, lines = (
            torch.arange(width, dtype=torch.float64).add_(0.5),
            torch.arange(height, dtype=torch.float64).add_(0.5).unsqueeze(1),
        )
        a, b, c, d, e, f = maps.view(-1, 6, 1, 1).unbind(1)
        x, y = a * columns + b * lines + c, d * columns + e * lines + f
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
        x, y = x.sub_(0.5), y.sub_(0.5)
        left, top = x.floor(), y.floor()
        along, down = x.sub_(left).unsqueeze(1), y.sub_(top).unsqueeze(1)
        left, top = left.long(), top.long()
        upper, lower = (
            _mixed(_at(images, left, line), _at(images, left + 1, line), along) for line in (top, top + 1)
        )
        return _mixed(upper, lower, down).to(images.dtype), inside


def _mixed(first: Tensor, second: Tensor, part: Tensor) -> Tensor:
    first, second = first.double(), second.double()
    return second.sub_(first).mul_(part).add_(first)


def _at(images: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the pixels at these positions [B, H, W], clamped to the border."""
    height, width = images.shape[2:]
    at = y.clamp(0, height - 1).mul_(width).add_(x.clamp(0, width - 1)).long().flatten(1)
    return images.flatten(2).gather(2, at.unsqueeze(1).expand(-1, images.shape[1], -1)).view(images.shape)


def _holds_fixed(maps: Tensor, height: int, width: int) -> Tensor:
    """Return whether fixed point is used: there is a rotation or shear, and no corner is too far away."""
    a, b, c, d, e, f = maps.unbind(1)
    near = torch.ones(len(maps), dtype=torch.bool)
    for x, y in ((0, 0), (width, height), (0, height), (width, 0)):
        near &= ((x * a + y * b + c).abs() < FARTHEST) & ((x * d + y * e + f).abs() < FARTHEST)
    return near & ~((b == 0) & (d == 0))


def _fixed(maps: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    a, b, c, d, e, f = maps.view(-1, 6, 1, 1).unbind(1)
    columns, lines = torch.arange(width), torch.arange(height).unsqueeze(1)

    def whole(number: Tensor) -> Tensor:
        return number.mul(65536.0).add_(0.5).floor_().clamp_(-(2.0**40), 2.0**40).long()

    x = whole(a) * columns + whole(b) * lines + whole(c + a * 0.5 + b * 0.5)
    y = whole(d) * columns + whole(e) * lines + whole(f + d * 0.5 + e * 0.5)
    return x >> 16, y >> 16


def _added(maps: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Accumulate the steps along the first column and then along each line, with the resulting rounding."""
    a, b, c, d, e, f = maps.unbind(1)
    x = _from(_from(c + b * 0.5 + a * 0.5, b, height), a.unsqueeze(1), width)
    y = _from(_from(f + e * 0.5 + d * 0.5, e, height), d.unsqueeze(1), width)
    return x.floor_().clamp_(-1, width).long(), y.floor_().clamp_(-1, height).long()


def _from(start: Tensor, step: Tensor, count: int) -> Tensor:
    steps = step.unsqueeze(-1).expand(*start.shape, count - 1)
    return torch.cat((start.unsqueeze(-1), steps), dim=-1).cumsum(-1)


@dataclass(frozen=True)
class TensorWarp:
    """torchvision's grid_sample, with maps about the image centre. ``fill`` None leaves zeros outside."""

    mode: str
    fill: tuple[float, ...] | None
    v2: bool

    def __call__(self, images: Tensor, maps: Tensor) -> Tensor:
        batch, _, height, width = images.shape
        floats = images.float()
        if self.fill is not None:
            floats = torch.cat((floats, floats.new_ones((batch, 1, height, width))), dim=1)
        sampled = grid_sample(
            floats.contiguous(),
            _grids(maps, height, width),
            mode=self.mode,
            padding_mode="zeros",
            align_corners=False,
        )
        if self.fill is not None:
            sampled, mask = sampled[:, :-1], sampled[:, -1:]
            fill = torch.tensor(self.fill).view(1, -1, 1, 1)
            if self.mode == "nearest":
                sampled = torch.where(mask < 0.5, fill, sampled)
            elif self.v2:
                sampled = sampled.sub(fill).mul_(mask).add_(fill)
            else:
                sampled = sampled * mask + (1.0 - mask) * fill
        return sampled if images.is_floating_point() else sampled.round().to(images.dtype)


def _grids(maps: Tensor, height: int, width: int) -> Tensor:
    """Return the grids [B, H, W, 2], with one product per image: a joint product may round differently."""
    places = torch.empty(1, height, width, 3)
    places[..., 0] = torch.linspace((1.0 - width) * 0.5, (width - 1.0) * 0.5, steps=width)
    places[..., 1] = torch.linspace((1.0 - height) * 0.5, (height - 1.0) * 0.5, steps=height).unsqueeze(1)
    places[..., 2] = 1
    rescaled = maps.float().view(-1, 2, 3).transpose(1, 2) / torch.tensor([0.5 * width, 0.5 * height])
    flat = places.view(1, height * width, 3)
    return torch.cat([flat.bmm(each.unsqueeze(0)) for each in rescaled]).view(-1, height, width, 2)
