"""Typical mistakes of a fused cross entropy. The gate must reject each of them.

It calls a variant with all arguments by name. ``more`` are those that the variant hands on unchanged.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels import load
from flatout.kernels.linear_cross_entropy.reference import linear_cross_entropy as reference


def mean_over_all_rows(target: Tensor, reduction: str = "mean", **more: Any) -> Tensor:
    """Divides by all rows, including ignored ones."""
    total = reference(target=target, reduction="sum", **more)
    return total / max(len(target), 1) if reduction == "mean" else total


def ignored_rows_count(weight: Tensor, target: Tensor, **more: Any) -> Tensor:
    """-100 wraps around to a class."""
    return reference(weight=weight, target=target % weight.shape[0], **more)


def no_smoothing(label_smoothing: float = 0.0, **more: Any) -> Tensor:
    return reference(**more)


def no_maximum_taken_off(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **more: Any
) -> Tensor:
    """log(sum(exp(logits))) without subtracting the maximum: overflows beyond 88."""
    if more.get("label_smoothing"):
        return reference(x, weight, target, bias, **more)
    logits, options = (
        F.linear(x, weight, bias),
        {name: more[name] for name in ("ignore_index", "reduction") if name in more},
    )
    return F.nll_loss(logits - logits.exp().sum(1, keepdim=True).log(), target, **options)


def last_chunk_left_out(x: Tensor, **more: Any) -> Tensor:
    """Rows beyond the last full chunk of 16 give no gradient."""
    keep = (torch.arange(len(x), device=x.device) < max(len(x) // 16 * 16, min(len(x), 16)))[:, None]
    return reference(torch.where(keep, x, x.detach()), **more)


def gradient_already_averaged(target: Tensor, ignore_index: int = -100, **more: Any) -> Tensor:
    """The unscaled gradient is divided by the count twice, the loss once."""
    loss = reference(target=target, ignore_index=ignore_index, **more)
    count = (target != ignore_index).sum().clamp(min=1)
    return loss / count + (loss - loss / count).detach()


def gradient_not_times_what_comes_from_above(**inputs: Any) -> Tensor:
    """Right only if the loss itself is differentiated: no accumulation, no loss scale."""

    class Unscaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, above):
            return torch.ones_like(above)

    return Unscaled.apply(reference(**inputs))


def padding_takes_part(weight: Tensor, bias: Tensor | None = None, pad_to: int = 0, **more: Any) -> Tensor:
    """Padding classes stay in the softmax, as classes with a logit of zero."""
    padding = -weight.shape[0] % (pad_to or 1)
    longer = None if bias is None else F.pad(bias, (0, padding))
    return reference(weight=F.pad(weight, (0, 0, 0, padding)), bias=longer, **more)


WRONG = {
    each.__name__: each
    for each in (
        mean_over_all_rows,
        ignored_rows_count,
        no_smoothing,
        no_maximum_taken_off,
        last_chunk_left_out,
        gradient_already_averaged,
        gradient_not_times_what_comes_from_above,
        padding_takes_part,
    )
}
KERNEL = replace(load("linear_cross_entropy"), wrong=WRONG)
