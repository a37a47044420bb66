"""Typical mistakes of a kernel like silu_mul.

The gate must reject each of them; if it accepts one, a case is missing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def last_block_left_out(a: Tensor, b: Tensor) -> Tensor:
    """Writes only whole blocks of 16 elements."""
    y = torch.nn.functional.silu(a) * b
    whole = y.numel() // 16 * 16
    return torch.where(
        (torch.arange(y.numel(), device=y.device) < whole).view(y.shape), y, torch.zeros_like(y)
    )


def strides_ignored(a: Tensor, b: Tensor) -> Tensor:
    """Uses memory order as index order."""
    flat = torch.as_strided(a, (a.numel(),), (1,))
    return torch.nn.functional.silu(flat).view(a.shape) * b


def half_the_gradient(a: Tensor, b: Tensor) -> Tensor:
    """Forgets the derivative of the gate."""
    return a * torch.sigmoid(a).detach() * b


WRONG = {each.__name__: each for each in (last_block_left_out, strides_ignored, half_the_gradient)}
