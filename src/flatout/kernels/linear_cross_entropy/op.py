"""The public operator: a linear layer and its cross entropy without storing all logits.

The rows are processed in chunks. For each chunk, one matrix product gives the logits; their gradients replace
them in place; two more products give the gradients of x, weight and bias; then the chunk's memory is used
again. So unscaled gradients exist when the forward pass ends. The backward pass multiplies them by the
incoming gradient (for "mean", over the number of targets), in float32, so that nothing underflows in float16.
In total there are three products, as many as in the plain computation.

Tensor Cores run at full rate if rows begin at multiples of 16 bytes. Longer buffer rows do not help: each
size of a product must be such a multiple. If Tensor Cores are used and the vocabulary is not a multiple
(50,257 in bfloat16), the products use a copy of the weight with extra rows of zeros (50,304). The losses use
only the real classes. The gradients of the extra classes are zeros: they add nothing to the gradient of x and
are cut off that of the weight.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flatout.kernels.cuda import SUFFIX, CudaSource
from flatout.kernels.kernel import has_triton

SOURCE = CudaSource(Path(__file__).with_name("kernel.cu"))
REDUCTIONS = ("mean", "sum")
CHUNK_BYTES = {"cuda": 256 << 20, "cpu": 32 << 20}  # logits per chunk; on a GPU, enough rows for full rate
IN_ONE_BYTES = 1 << 20  # smaller logits are computed in one chunk
CHUNKS = 16  # fewest chunks for larger ones
ROWS = 16  # fewest rows per chunk
OF_X, OF_WEIGHT, OF_BIAS = 1, 2, 4  # requested gradients
ALIGNED_BYTES, PADDED_TO = 16, 64  # the alignment that Tensor Cores need, and the multiple used for padding


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    implementation: str = "",
    pad_to: int = 0,
) -> Tensor:
    """cross_entropy(linear(x, weight, bias), target), a scalar in float32 (float64 for float64).

    x [N, D]; weight [V, D] and bias [V] of x's type; target [N] of int64. ``reduction`` is "mean" or "sum".
    Differentiable once: a second derivative raises RuntimeError. Raises ValueError for shapes that do not
    match. ``implementation``: "" (the best here), "plain", "triton", "cuda". ``pad_to``: pad the classes of
    the products to this multiple; 0 chooses it by device and type. It changes no result.
    """
    if x.dim() != 2 or weight.dim() != 2 or target.shape != x.shape[:1] or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)}, weight {tuple(weight.shape)} and target {tuple(target.shape)} are not [N, D], [V, D] and [N]"
        )
    others = (weight,) if bias is None else (weight, bias)
    if (
        any(each.dtype is not x.dtype or each.device != x.device for each in others)
        or (bias is not None and bias.shape != weight.shape[:1])
        or target.dtype is not torch.int64
        or target.device != x.device
    ):
        raise ValueError(
            f"x is {x.dtype} on {x.device}; weight and bias [V] must match, and target must be int64 there; target is {target.dtype}"
        )
    if pad_to < 0:
        raise ValueError(f"pad_to must be a number of classes >= 0, not {pad_to}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join(REDUCTIONS)}")
    wanted = 0
    if torch.is_grad_enabled():
        wanted = sum(
            bit
            for tensor, bit in ((x, OF_X), (weight, OF_WEIGHT), (bias, OF_BIAS))
            if tensor is not None and tensor.requires_grad
        )
    loss: Tensor = torch.ops.flatout.linear_cross_entropy(
        x, weight, target, bias, ignore_index, reduction, label_smoothing, wanted, implementation, pad_to
    )[0]
    return loss


def forward(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    wanted: int,
    implementation: str,
    pad_to: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Loss; factor of all gradients; unscaled gradients of x, weight and bias (empty if not requested)."""
    way = implementation or best(x)
    rows, classes = x.shape[0], weight.shape[0]
    columns = padded(classes, pad_to or _suits(x, classes))
    if columns > classes:
        weight, bias = (
            F.pad(weight, (0, 0, 0, columns - classes)),
            None if bias is None else F.pad(bias, (0, columns - classes)),
        )
    sums = torch.float64 if x.dtype is torch.float64 else torch.float32
    factor = (
        (target != ignore_index).sum().to(sums).reciprocal()
        if reduction == "mean"
        else x.new_ones((), dtype=sums)
    )
    losses = x.new_empty(rows, dtype=sums)
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format) if wanted & OF_X else x.new_empty(0)
    of_weight = x.new_zeros(weight.shape, dtype=sums) if wanted & OF_WEIGHT else x.new_empty(0, dtype=sums)
    of_bias = x.new_zeros(columns, dtype=sums) if wanted & OF_BIAS else x.new_empty(0, dtype=sums)
    step = chunk_rows(rows, columns, x.device.type)
    for first in range(0, rows, step):
        part = slice(first, min(first + step, rows))
        logits = F.linear(x[part], weight, bias)
        gradient = _losses(
            way,
            logits,
            classes,
            target[part].contiguous(),
            losses[part],
            ignore_index,
            label_smoothing,
            bool(wanted),
        )
        del logits
        if wanted & OF_X:
            torch.mm(gradient, weight, out=of_x[part])
        if wanted & OF_WEIGHT:
            if x.dtype is sums:
                of_weight.addmm_(gradient.t(), x[part])
            else:
                of_weight += gradient.t() @ x[part]
        if wanted & OF_BIAS:
            of_bias += gradient.sum(0, dtype=sums)
        del gradient  # before the next chunk
    return losses.sum() * factor, factor, of_x, of_weight[:classes], of_bias[:classes]


def padded(classes: int, multiple: int) -> int:
    """The next multiple at or above ``classes``."""
    return -(-classes // multiple) * multiple


def _suits(x: Tensor, classes: int) -> int:
    """The multiple of classes that suits the products."""
    tensor_cores = x.dtype in (torch.float16, torch.bfloat16) or (
        x.dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    )
    return PADDED_TO if x.is_cuda and tensor_cores and classes * x.element_size() % ALIGNED_BYTES else 1


def chunk_rows(rows: int, classes: int, device_type: str) -> int:
    """The rows per chunk of logits."""
    if 4 * rows * classes <= IN_ONE_BYTES:
        return max(rows, 1)
    by_bytes = CHUNK_BYTES.get(device_type, CHUNK_BYTES["cpu"]) // (4 * classes)
    return max(min(by_bytes, -(-rows // CHUNKS)), ROWS)


def best(x: Tensor) -> str:
    """The best implementation for this tensor."""
    if not x.is_cuda or x.dtype not in SUFFIX:
        return "plain"
    return "triton" if has_triton() else "cuda"


def _losses(
    way: str,
    logits: Tensor,
    classes: int,
    target: Tensor,
    losses: Tensor,
    ignore_index: int,
    smoothing: float,
    with_gradient: bool,
) -> Tensor:
    """Fills ``losses``; returns the gradients of the logits, in place if their type allows it.

    Gradients beyond the classes are zeros.
    """
    if way == "triton":
        from flatout.kernels.linear_cross_entropy import in_triton

        in_triton.losses(logits, classes, target, losses, ignore_index, smoothing, with_gradient)
        return logits
    if way == "cuda":
        SOURCE.launch(
            f"losses_{SUFFIX[logits.dtype]}",
            (logits.shape[0],),
            min(max(-(-classes // 128) * 32, 32), 512),
            (
                logits,
                target,
                losses,
                classes,
                logits.shape[1],
                ignore_index,
                float(smoothing),
                int(with_gradient),
            ),
            logits.device,
        )
        return logits
    gradient = _plain_losses(logits[:, :classes], target, losses, ignore_index, smoothing, with_gradient)
    if logits.shape[1] == classes:
        return gradient
    logits[:, :classes] = gradient
    logits[:, classes:] = 0.0
    return logits


def _plain_losses(
    logits: Tensor, target: Tensor, losses: Tensor, ignore_index: int, smoothing: float, with_gradient: bool
) -> Tensor:
    stored, classes = logits.dtype, logits.shape[1]
    logits = logits.to(losses.dtype)
    left_out = target == ignore_index
    right = target.masked_fill(left_out, 0)[:, None]
    log_sum = torch.logsumexp(logits, 1)
    row = log_sum - (1 - smoothing) * logits.gather(1, right)[:, 0]
    if smoothing > 0:
        row = row - smoothing * logits.mean(1)
    torch.where(left_out, torch.zeros((), dtype=row.dtype, device=row.device), row, out=losses)
    if not with_gradient:
        return logits
    gradient = logits.sub_(log_sum[:, None]).exp_()
    if smoothing > 0:
        gradient.sub_(smoothing / classes)
    gradient.scatter_add_(1, right, gradient.new_full((), smoothing - 1.0).expand_as(right))
    gradient.masked_fill_(left_out[:, None], 0.0)
    return gradient.to(stored)


_forward = torch.library.custom_op("flatout::linear_cross_entropy", forward, mutates_args=())


@_forward.register_fake
def _(x, weight, target, bias, ignore_index, reduction, label_smoothing, wanted, implementation, pad_to):
    sums = torch.float64 if x.dtype is torch.float64 else torch.float32
    one = x.new_empty((), dtype=sums)
    return (
        one,
        torch.empty_like(one),
        x.new_empty(x.shape if wanted & OF_X else (0,)),
        x.new_empty(weight.shape if wanted & OF_WEIGHT else (0,), dtype=sums),
        x.new_empty(weight.shape[0] if wanted & OF_BIAS else 0, dtype=sums),
    )


def _setup(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _, bias, *_, ctx.wanted, _, _ = inputs
    ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _gradient(ctx: FunctionCtx, of_loss: Tensor, *_: object) -> Any:
    factor, *unscaled = ctx.saved_tensors
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy is differentiable only once, because the forward pass computes its gradients. "
            "For a second derivative use torch.nn.functional.linear and cross_entropy."
        )
    # If no target counts, "mean" is 0 / 0: as in torch, the loss is NaN and the gradients are zero.
    scale = torch.where(factor.isinf(), torch.zeros_like(factor), of_loss * factor)
    of_x, of_weight, of_bias = (
        (held * scale).to(dtype) if ctx.wanted & bit else None
        for held, bit, dtype in zip(unscaled, (OF_X, OF_WEIGHT, OF_BIAS), ctx.dtypes, strict=True)
    )
    return of_x, of_weight, None, of_bias, None, None, None, None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
OPERATORS: dict[str, Any] = {"flatout::linear_cross_entropy": forward}
