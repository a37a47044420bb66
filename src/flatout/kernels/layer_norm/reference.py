"""Layer normalisation over the last axis, in plain torch. Works in float64.

y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias      var without Bessel's correction
"""

import torch


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """y. x [..., N]; weight, bias [N]."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
