"""The cross entropy of a linear layer from chunks of rows, so that all logits never exist at once.

One matrix product gives the logits of a chunk. Two more products give the gradients of x, weight and bias, and the
memory of the chunk is used again. So there are three products in total, as many as in the plain computation,
and the gradients exist when the forward pass ends. The backward pass multiplies them by the incoming gradient
(for "mean", over the number of targets), in float32, so that nothing underflows in float16.

Why not torch's F.linear_cross_entropy: in 2.14 its chunks return the loss of bfloat16 rows in bfloat16, the
error of the weight's gradient is four times that of the plain computation, and label smoothing computes all
logits. Torch 2.11 and 2.12 do not have it.

Tensor Cores run at full rate if each size of a product is a multiple of 16 bytes. Where the vocabulary is not
(50,257 in bfloat16), the products use a copy of the weight with extra rows of zeros (50,304). The losses use the
real classes only.

Sources: gradients in the forward pass, by chunks of rows: Hsu et al., Liger Kernel, 2024; Wijmans et al., Cut
Your Losses, 2024.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

REDUCTIONS = ("mean", "sum")
CHUNK_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}  # logits per chunk; on a GPU, enough rows for full rate
MAX_ONE_CHUNK_BYTES = 1 << 20  # smaller logits are computed in one chunk
MIN_CHUNKS = 16  # fewest chunks for larger ones
MIN_ROWS = 16  # fewest rows per chunk
ALIGNMENT_BYTES = 16  # that Tensor Cores need
PADDING_MULTIPLE = 64


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """cross_entropy(linear(x, weight, bias), target), a scalar in float32 (float64 for float64).

    x [N, D]; weight [V, D] and bias [V] of x's type; target [N] of class numbers. ``reduction`` is "mean" or
    "sum". Raises RuntimeError for a second derivative.
    """
    loss: Tensor = _ChunkedLoss.apply(x, weight, bias, target, ignore_index, reduction, label_smoothing)
    return loss


def chunk_rows(rows: int, classes: int, device_type: str) -> int:
    """The rows per chunk of logits."""
    if 4 * rows * classes <= MAX_ONE_CHUNK_BYTES:
        return max(rows, 1)
    by_bytes = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // (4 * classes)
    return max(min(by_bytes, -(-rows // MIN_CHUNKS)), MIN_ROWS)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
    ) -> Tensor:
        x_needs_grad, weight_needs_grad, bias_needs_grad, *_ = ctx.needs_input_grad
        sum_dtype = torch.promote_types(x.dtype, torch.float32)
        classes, extra = len(weight), _extra_rows(x, len(weight))
        ctx.classes, ctx.dtypes = classes, (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        if extra:
            weight = F.pad(weight, (0, 0, 0, extra))
            bias = None if bias is None else F.pad(bias, (0, extra))
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if x_needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=sum_dtype) if weight_needs_grad else None
        grad_bias = torch.zeros_like(bias, dtype=sum_dtype) if bias is not None and bias_needs_grad else None
        total = x.new_zeros((), dtype=sum_dtype)
        chunk = chunk_rows(len(x), len(weight), x.device.type)
        for first in range(0, len(x), chunk):
            rows = slice(first, first + chunk)
            logits = F.linear(x[rows], weight, bias)
            loss, grad = _loss_and_gradient(
                logits[:, :classes].to(sum_dtype), target[rows], ignore_index, label_smoothing
            )
            del logits
            total += loss
            grad = F.pad(grad.to(x.dtype), (0, extra)) if extra else grad.to(x.dtype)
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[rows])
            if grad_weight is not None:
                grad_weight += grad.t() @ x[rows]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=sum_dtype)
            del grad  # before the next chunk
        target_count = (target != ignore_index).sum() if reduction == "mean" else x.new_ones(())
        factor = target_count.to(sum_dtype).reciprocal()
        ctx.save_for_backward(factor, grad_x, grad_weight, grad_bias)
        return total * factor

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss is differentiable only once, because the forward pass computes its gradients. "
                "For a second derivative (create_graph=True), run without the lever fused_ops."
            )
        factor, *unscaled = ctx.saved_tensors
        # If no target counts, "mean" is 0 / 0: as in torch, the loss is NaN and the gradients are zero.
        scale = torch.where(factor.isinf(), 0.0, grad_loss * factor)
        grad_x, grad_weight, grad_bias = (
            None if grad is None else (grad * scale).to(dtype)
            for grad, dtype in zip(unscaled, ctx.dtypes, strict=True)
        )
        grad_weight = None if grad_weight is None else grad_weight[: ctx.classes]
        grad_bias = None if grad_bias is None else grad_bias[: ctx.classes]
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _extra_rows(x: Tensor, classes: int) -> int:
    """The rows of zeros after which the classes are a multiple that suits Tensor Cores, if they multiply."""
    tensor_cores = x.dtype in (torch.float16, torch.bfloat16) or (
        x.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )
    misaligned = classes * x.element_size() % ALIGNMENT_BYTES != 0
    return -classes % PADDING_MULTIPLE if x.is_cuda and tensor_cores and misaligned else 0


def _loss_and_gradient(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    ignored = target == ignore_index
    indices = target.masked_fill(ignored, 0)[:, None]
    log_probs = logits.log_softmax(1)
    losses = (smoothing - 1) * log_probs.gather(1, indices)[:, 0]
    if smoothing > 0:
        losses -= smoothing * log_probs.mean(1)
    grad = log_probs.exp_()
    if smoothing > 0:
        grad.sub_(smoothing / logits.shape[1])
    grad.scatter_add_(1, indices, grad.new_full((), smoothing - 1.0).expand_as(indices))
    grad.masked_fill_(ignored[:, None], 0.0)
    return losses.masked_fill(ignored, 0.0).sum(), grad
