"""Typical mistakes of a batched crop and normalisation. The gate must reject each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatout.kernels import load
from flatout.kernels.augment import reference as module

reference: Any = module.augment


def times_the_reciprocal(images: Tensor, *args: object, mean: Tensor, std: Tensor, **more: object) -> Tensor:
    """Multiplies by 1/255 and 1/std: close, but not bitwise equal."""
    zero, one = torch.zeros_like(mean), torch.ones_like(std)
    byte = reference(images, *args, mean=zero, std=one / 255, **{**more, "dtype": torch.float32})
    return ((byte.round() * (1 / 255) - mean[:, None, None]) * (1 / std[:, None, None])).to(more["dtype"])


def channels_swapped(images: Tensor, *args: object, mean: Tensor, std: Tensor, **more: object) -> Tensor:
    """Means in BGR order."""
    return reference(images, *args, mean=mean.flip(0), std=std, **more)


def never_flipped(images: Tensor, *args: object, flip: Tensor, **more: object) -> Tensor:
    return reference(images, *args, flip=torch.zeros_like(flip), **more)


def flipped_before_the_crop(images: Tensor, *args: object, flip: Tensor, **more: object) -> Tensor:
    """Mirrors the whole image, then crops another part of it."""
    axis = 2 if more["layout"] == "hwc" else 3
    mirrored = torch.where(flip[:, None, None, None], images.flip(axis), images)
    return reference(mirrored, *args, flip=torch.zeros_like(flip), **more)


def padded_after_normalising(
    images: Tensor, *args: object, mean: Tensor, std: Tensor, fill: int, **more: object
) -> Tensor:
    """The border is 0 in the result instead of a normalised black pixel."""
    return reference(
        images, *args, mean=mean, std=std, fill=int(255 * float(mean[0])) if more["padding"] else fill, **more
    )


def one_corner_for_all(images: Tensor, *args: object, top: Tensor, **more: object) -> Tensor:
    return reference(images, *args, top=top[:1].expand_as(top), **more)


def rounded_before_normalising(
    images: Tensor, *args: object, mean: Tensor, std: Tensor, **more: object
) -> Tensor:
    """Casts to half precision first."""
    scaled = (
        reference(images, *args, mean=torch.zeros_like(mean), std=torch.ones_like(std), **more)
        .to(torch.bfloat16)
        .float()
    )
    return ((scaled - mean[:, None, None]) / std[:, None, None]).to(more["dtype"])


WRONG = {
    each.__name__: each
    for each in (
        times_the_reciprocal,
        channels_swapped,
        never_flipped,
        flipped_before_the_crop,
        padded_after_normalising,
        one_corner_for_all,
        rounded_before_normalising,
    )
}
KERNEL = replace(load("augment"), wrong=WRONG)
