"""The linear layer and the cross entropy after it, in plain torch. Works in float64.

logits = x weight' + bias                                       [N, V]
loss_i = logsumexp(logits_i) - (1 - s) logits_i,target - s mean(logits_i)        s: label smoothing
loss   = sum of loss_i over counted targets, for "mean" divided by their number
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> torch.Tensor:
    """A scalar. x [N, D]; weight [V, D]; bias [V]; target [N] of classes. ``pad_to`` changes no result."""
    return F.cross_entropy(
        F.linear(x, weight, bias),
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
