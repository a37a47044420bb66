"""Typical mistakes of a fused cross entropy. The gate must reject each of them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.linear_cross_entropy.reference import linear_cross_entropy as reference


def mean_over_all_rows(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    """Divides by all rows, including ignored ones."""
    total = reference(x, weight, target, bias, ignore_index, "sum", label_smoothing)
    return total / max(len(target), 1) if reduction == "mean" else total


def ignored_rows_count(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    """-100 wraps around to a class."""
    return reference(x, weight, target % weight.shape[0], bias, ignore_index, reduction, label_smoothing)


def no_smoothing(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    return reference(x, weight, target, bias, ignore_index, reduction)


def no_maximum_taken_off(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    """log(sum(exp(logits))) without subtracting the maximum: overflows beyond 88."""
    logits = F.linear(x, weight, bias)
    return (
        F.nll_loss(
            logits - logits.exp().sum(1, keepdim=True).log(),
            target,
            ignore_index=ignore_index,
            reduction=reduction,
        )
        if not label_smoothing
        else reference(x, weight, target, bias, ignore_index, reduction, label_smoothing)
    )


def last_chunk_left_out(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    """Rows beyond the last full chunk of 16 give no gradient."""
    keep = (torch.arange(len(x), device=x.device) < max(len(x) // 16 * 16, min(len(x), 16)))[:, None]
    return reference(
        torch.where(keep, x, x.detach()), weight, target, bias, ignore_index, reduction, label_smoothing
    )


def gradient_already_averaged(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    """The unscaled gradient is divided by the count twice, the loss once."""
    loss = reference(x, weight, target, bias, ignore_index, reduction, label_smoothing)
    count = (target != ignore_index).sum().clamp(min=1)
    return loss / count + (loss - loss / count).detach()


def gradient_not_times_what_comes_from_above(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    """Right only if the loss itself is differentiated: no accumulation, no loss scale."""

    class Unscaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, above):
            return torch.ones_like(above)

    return Unscaled.apply(reference(x, weight, target, bias, ignore_index, reduction, label_smoothing))


def padding_takes_part(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    pad_to: int = 0,
) -> Tensor:
    """Padding classes stay in the softmax, as classes with a logit of zero."""
    more = -weight.shape[0] % (pad_to or 1)
    longer = None if bias is None else F.pad(bias, (0, more))
    return reference(
        x, F.pad(weight, (0, 0, 0, more)), target, longer, ignore_index, reduction, label_smoothing
    )


VARIANTS = {
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
