"""Typical mistakes of a normalisation. The gate must reject each of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatout.kernels.layer_norm.reference import layer_norm as reference


def eps_outside_the_root(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Any:
    h = x if residual is None else x + residual
    centred = h - h.mean(-1, keepdim=True)
    return _finish(
        centred / (centred.square().mean(-1, keepdim=True).sqrt() + eps), h, weight, bias, residual
    )


def bessel(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Any:
    """The unbiased variance, the default of torch.var."""
    h = x if residual is None else x + residual
    return _finish(
        (h - h.mean(-1, keepdim=True))
        / torch.sqrt(h.var(-1, keepdim=True, correction=min(1, h.shape[-1] - 1)) + eps),
        h,
        weight,
        bias,
        residual,
    )


def padded_columns_counted(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Any:
    """The masked lanes of the last block enter the variance as (0 - mean) squared."""
    h = x if residual is None else x + residual
    width = h.shape[-1]
    padding = 2 ** (width - 1).bit_length() - width
    mean = h.mean(-1, keepdim=True)
    variance = ((h - mean).square().sum(-1, keepdim=True) + padding * mean.square()) / width
    return _finish((h - mean) / torch.sqrt(variance + eps), h, weight, bias, residual)


def statistics_in_half(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Any:
    """Sums in bfloat16."""
    h = x if residual is None else x + residual
    mean = h.to(torch.bfloat16).mean(-1, keepdim=True).to(h.dtype)
    return _finish(
        (h - mean) / torch.sqrt((h - mean).square().mean(-1, keepdim=True) + eps), h, weight, bias, residual
    )


def no_gradient_through_the_variance(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Any:
    h = x if residual is None else x + residual
    centred = h - h.mean(-1, keepdim=True)
    return _finish(
        centred / torch.sqrt(centred.square().mean(-1, keepdim=True).detach() + eps),
        h,
        weight,
        bias,
        residual,
    )


def residual_forgotten_in_the_gradient(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
) -> Any:
    return reference(x, weight, bias, eps, None if residual is None else residual.detach())


def _finish(y: Tensor, h: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Any:
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if residual is None else (y, h)


VARIANTS = {
    each.__name__: each
    for each in (
        eps_outside_the_root,
        bessel,
        padded_columns_counted,
        statistics_in_half,
        no_gradient_through_the_variance,
        residual_forgotten_in_the_gradient,
    )
}
