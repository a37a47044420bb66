"""Mistakes that a kernel like silu_mul is prone to. The gate must reject each of them; one that it accepts shows a missing case."""

from __future__ import annotations

import torch
from torch import Tensor


def last_block_left_out(a: Tensor, b: Tensor) -> Tensor:
    """Only whole blocks of 16 elements are written."""
    y = torch.nn.functional.silu(a) * b
    whole = y.numel() // 16 * 16
    return torch.where((torch.arange(y.numel(), device=y.device) < whole).view(y.shape), y, torch.zeros_like(y))


def strides_ignored(a: Tensor, b: Tensor) -> Tensor:
    """Takes memory order for index order."""
    flat = torch.as_strided(a, (a.numel(),), (1,))
    return torch.nn.functional.silu(flat).view(a.shape) * b


def half_the_gradient(a: Tensor, b: Tensor) -> Tensor:
    """The gate's own derivative is forgotten."""
    return a * torch.sigmoid(a).detach() * b


WRONG = {each.__name__: each for each in (last_block_left_out, strides_ignored, half_the_gradient)}
