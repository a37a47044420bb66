"""Typical mistakes of a root-mean-square normalisation. The gate must reject each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from flatout.kernels import load
from flatout.kernels.layer_norm.reference import layer_norm, rms_norm


def centred(x: Tensor, **more: Any) -> Any:
    """Layer normalisation without its bias."""
    return layer_norm(x, **more)


def norm_for_mean(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-5, residual: Tensor | None = None
) -> Any:
    """The root of the sum instead of the mean, for widths that fill a block.

    The scale is right only if the width is a power of four.
    """
    h = x if residual is None else x + residual
    root = 2.0 ** round(h.shape[-1].bit_length() / 2) if h.shape[-1] else 1.0
    y = h / (h.square().sum(-1, keepdim=True).sqrt() / root + eps)
    y = y if weight is None else y * weight
    return y if residual is None else (y, h)


def weight_plus_one(x: Tensor, weight: Tensor | None = None, **more: Any) -> Any:
    """Gemma's convention, y * (1 + weight), applied to a model that does not use it."""
    return rms_norm(x, None if weight is None else weight + 1, **more)


def residual_not_in_the_sum(x: Tensor, **more: Any) -> Any:
    """The normalised row is right, but the returned sum is x alone."""
    found = rms_norm(x, **more)
    return (found[0], x) if isinstance(found, tuple) else found


WRONG = {each.__name__: each for each in (centred, norm_for_mean, weight_plus_one, residual_not_in_the_sum)}
KERNEL = replace(load("rms_norm"), wrong=WRONG)
