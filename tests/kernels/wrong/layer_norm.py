"""Typical mistakes of a normalisation. The gate must reject each of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatout.kernels import load


def eps_outside_the_root(h: Tensor, eps: float) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True).sqrt() + eps)


def bessel(h: Tensor, eps: float) -> Tensor:
    """The unbiased variance, the default of torch.var."""
    variance = h.var(-1, keepdim=True, correction=min(1, h.shape[-1] - 1))
    return (h - h.mean(-1, keepdim=True)) / torch.sqrt(variance + eps)


def padded_columns_counted(h: Tensor, eps: float) -> Tensor:
    """The masked lanes of the last block enter the variance as (0 - mean) squared."""
    width = h.shape[-1]
    padding = 2 ** (width - 1).bit_length() - width
    mean = h.mean(-1, keepdim=True)
    variance = ((h - mean).square().sum(-1, keepdim=True) + padding * mean.square()) / width
    return (h - mean) / torch.sqrt(variance + eps)


def statistics_in_half(h: Tensor, eps: float) -> Tensor:
    """Sums in bfloat16."""
    mean = h.to(torch.bfloat16).mean(-1, keepdim=True).to(h.dtype)
    return (h - mean) / torch.sqrt((h - mean).square().mean(-1, keepdim=True) + eps)


def no_gradient_through_the_variance(h: Tensor, eps: float) -> Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True).detach() + eps)


def _whole(normalised: Callable[[Tensor, float], Tensor]) -> Callable[..., Any]:
    """The operation around a wrong normalisation."""

    def variant(
        x: Tensor,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        y = normalised(x, eps)
        y = y if weight is None else y * weight
        return y if bias is None else y + bias

    return variant


WRONG = {
    each.__name__: _whole(each)
    for each in (
        eps_outside_the_root,
        bessel,
        padded_columns_counted,
        statistics_in_half,
        no_gradient_through_the_variance,
    )
}
KERNEL = replace(load("layer_norm"), wrong=WRONG)
