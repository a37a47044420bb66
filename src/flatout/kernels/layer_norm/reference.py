"""Layer normalisation over the last axis, in plain torch. Works in float64.

h = x + residual
y = (h - mean(h)) / sqrt(var(h) + eps) * weight + bias      var without Bessel's correction
"""

from __future__ import annotations

import torch


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """y, and with a residual (y, h). x, residual [..., N]; weight, bias [N]."""
    h = x if residual is None else x + residual
    centred = h - h.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y if residual is None else (y, h)
