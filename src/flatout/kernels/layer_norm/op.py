"""The public function and its torch.library operators with gradient and fake.

``implementation`` is "" (the best for the given tensors) or a name. Rows are made contiguous here, once;
everything below sees x as [R, N].
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flatout.kernels.cuda import SUFFIX, CudaSource
from flatout.kernels.kernel import has_triton

SOURCE = CudaSource(Path(__file__).with_name("kernel.cu"))
TRITON_MAX_WIDTH = 16384  # a row must fit into the registers of one program
CUDA_MAX_WIDTH = 12288  # float32 sums for weight and bias take 96 KiB of shared memory (A100 and later: 163)
BLOCKS = 256  # most blocks of the backward pass: their partial sums take BLOCKS * N * 8 bytes


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    implementation: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Layer normalisation over the last axis; with a residual, of x + residual, which is returned as well.

    x, residual [..., N]; weight, bias [N], of x's type. ``implementation``: "" (the best for these tensors),
    "plain", "triton", "cuda". Differentiable once. Raises ValueError for inputs that do not match.
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    columns = x.shape[-1:]
    for tensor, shape in ((residual, x.shape), (weight, columns), (bias, columns)):
        # The kernels take addresses, so another shape, type or device would be misread.
        if tensor is not None and (
            tensor.shape != shape or tensor.dtype is not x.dtype or tensor.device != x.device
        ):
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}, but another input is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"it must have the type and device of x, and shape {tuple(shape)}"
            )
    y, h, _, _ = torch.ops.flatout.layer_norm(x, weight, bias, residual, eps, implementation)
    return y if residual is None else (y, h)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and h (empty without a residual) in x's shape; mean and rstd [R] in float32 (float64 for float64)."""
    way, flat, flat_residual = implementation or best(x), _rows(x), _rows(residual)
    if way == "plain":
        return _plain_forward(x.shape, flat, weight, bias, flat_residual, eps)
    y = torch.empty_like(flat)
    h = torch.empty_like(flat) if residual is not None else flat.new_empty(0)
    mean, rstd = (torch.empty(len(flat), dtype=torch.float32, device=x.device) for _ in range(2))
    weight, bias = (None if tensor is None else tensor.contiguous() for tensor in (weight, bias))
    if way == "triton":
        from flatout.kernels.layer_norm import in_triton

        if len(flat):
            in_triton.forward(flat, flat_residual, weight, bias, eps, y, h, mean, rstd)
    else:
        width = x.shape[-1]
        SOURCE.launch(
            f"forward_{SUFFIX[x.dtype]}",
            (len(flat),),
            _threads(width),
            (flat, flat_residual, weight, bias, y, h, mean, rstd, width, float(eps)),
            x.device,
            shared_bytes=4 * width,
        )
    return y.view(x.shape), h.view(x.shape) if residual is not None else h, mean, rstd


def backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h (so of x and the residual), weight and bias; the last two [N], in float32 or better."""
    way, flat_dy, flat_dh, flat = implementation or best(h), _rows(dy), _rows(dh), _rows(h)
    if way == "plain":
        return _plain_backward(h.shape, flat_dy, flat_dh, flat, weight, mean, rstd)
    rows, width = flat.shape
    dx = torch.empty_like(flat)
    partial = torch.empty((max(min(rows, BLOCKS), 1), 2, width), dtype=torch.float32, device=h.device)
    weight = None if weight is None else weight.contiguous()
    if way == "triton":
        from flatout.kernels.layer_norm import in_triton

        in_triton.backward(flat_dy, flat_dh, flat, weight, mean, rstd, dx, partial)
    else:
        SOURCE.launch(
            f"backward_{SUFFIX[h.dtype]}",
            (partial.shape[0],),
            _threads(width),
            (flat_dy, flat_dh, flat, weight, mean, rstd, dx, partial, rows, width),
            h.device,
            shared_bytes=8 * width,
        )
    of_weight, of_bias = partial.sum(0)
    return dx.view(h.shape), of_weight.clone(), of_bias.clone()


def best(x: Tensor) -> str:
    """The best implementation for this tensor: on a CPU, torch's own vectorised one."""
    width = x.shape[-1]
    if not x.is_cuda or x.dtype not in SUFFIX or not width:
        return "plain"
    if has_triton() and width <= TRITON_MAX_WIDTH:
        return "triton"
    return "cuda" if width <= CUDA_MAX_WIDTH else "plain"


def _rows(tensor: Any) -> Any:
    if tensor is None:
        return None
    width = tensor.shape[-1]
    return tensor.reshape(tensor.numel() // width if width else 0, width).contiguous()


def _threads(width: int) -> int:
    return min(max((width + 3) // 4 + 31, 32) // 32 * 32, 256)


def _plain_forward(
    shape: object,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = x if residual is None else x + residual
    # On a CPU, torch returns statistics of bfloat16 rows in bfloat16, too coarse for a gradient.
    sums = torch.promote_types(h.dtype, torch.float32)
    wide = (None if tensor is None else tensor.to(sums) for tensor in (weight, bias))
    y, mean, rstd = torch.ops.aten.native_layer_norm(h.to(sums), (h.shape[-1],), *wide, eps)
    return (
        y.to(h.dtype).view(shape),
        h.view(shape) if residual is not None else x.new_empty(0),
        mean.flatten(),
        rstd.flatten(),
    )


def _plain_backward(
    shape: object,
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    sums, width = mean.dtype, h.shape[-1]
    scale = h.new_ones(width, dtype=sums) if weight is None else weight.to(sums)
    dx, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
        dy.to(sums),
        h.to(sums),
        (width,),
        mean[:, None],
        rstd[:, None],
        scale,
        torch.zeros_like(scale),
        (True, True, True),
    )
    return (dx if dh is None else dx + dh).to(h.dtype).view(shape), of_weight, of_bias


_forward = torch.library.custom_op("flatout::layer_norm", forward, mutates_args=())
_backward = torch.library.custom_op("flatout::layer_norm_backward", backward, mutates_args=())


@_forward.register_fake
def _(x, weight, bias, residual, eps, implementation):
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    mean, rstd = (x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
    return x.new_empty(x.shape), x.new_empty(0 if residual is None else x.shape), mean, rstd


@_backward.register_fake
def _(dy, dh, h, weight, mean, rstd, implementation):
    of_weight, of_bias = (h.new_empty(h.shape[-1], dtype=mean.dtype) for _ in range(2))
    return h.new_empty(h.shape), of_weight, of_bias


def _setup(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, ctx.implementation = inputs
    _, h, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(h if ctx.has_residual else x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _gradient(ctx: FunctionCtx, dy: Tensor | None, dh: Tensor | None, *_: object) -> Any:
    h, weight, mean, rstd = ctx.saved_tensors
    of_h, of_weight, of_bias = (dh if ctx.has_residual else None), None, None
    if dy is not None:  # otherwise only the sum was used
        of_h, of_weight, of_bias = torch.ops.flatout.layer_norm_backward(
            dy, of_h, h, weight, mean, rstd, ctx.implementation
        )
        of_weight = None if weight is None else of_weight.to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype)
    return of_h, of_weight, of_bias, of_h if ctx.has_residual else None, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
OPERATORS: dict[str, Any] = {"flatout::layer_norm": forward, "flatout::layer_norm_backward": backward}
