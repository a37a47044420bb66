"""The public functions and their torch.library operators with gradient and fake.

One operator serves layer and RMS normalisation (``centre``), forward and backward. ``implementation`` is ""
(the best for the given tensors) or a name. Rows are made contiguous here, once; everything below sees x as
[R, N].
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
CUDA_MAX_WIDTH = (
    12288  # float32 sums for weight and bias in 96 KiB of shared memory (A100 and later have 163)
)
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
    _must_fit(x, residual, weight, bias)
    y, h, _, _ = torch.ops.flatout.layer_norm(x, weight, bias, residual, eps, True, implementation)
    return y if residual is None else (y, h)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-5,
    residual: Tensor | None = None,
    implementation: str = "",
) -> Tensor | tuple[Tensor, Tensor]:
    """Root-mean-square normalisation, like ``layer_norm`` without mean and bias.

    Source: Zhang and Sennrich, 2019.
    """
    _must_fit(x, residual, weight)
    y, h, _, _ = torch.ops.flatout.layer_norm(x, weight, None, residual, eps, False, implementation)
    return y if residual is None else (y, h)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    centre: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y and h (empty without a residual) in x's shape; mean and rstd [R] in float32 (float64 for float64)."""
    width = x.shape[-1]
    rows = x.numel() // width if width else 0
    way = implementation or best(x)
    flat, other = (
        x.reshape(rows, width).contiguous(),
        None if residual is None else residual.reshape(rows, width).contiguous(),
    )
    if way == "plain":
        return _plain_forward(x.shape, flat, weight, bias, other, eps, centre)
    y = torch.empty_like(flat)
    h = torch.empty_like(flat) if residual is not None else flat.new_empty(0)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    weight, bias = (None if each is None else each.contiguous() for each in (weight, bias))
    if way == "triton":
        from flatout.kernels.layer_norm import in_triton

        if rows:
            in_triton.forward(flat, other, weight, bias, eps, centre, y, h, mean, rstd)
    else:
        SOURCE.launch(
            f"forward_{SUFFIX[x.dtype]}",
            (rows,),
            _threads(width),
            (flat, other, weight, bias, y, h, mean, rstd, width, float(eps), int(centre)),
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
    centre: bool,
    implementation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of h (so of x and the residual), weight and bias; the last two [N], in float32 or better."""
    width = h.shape[-1]
    rows = h.numel() // width if width else 0
    way = implementation or best(h)
    g, flat = dy.reshape(rows, width).contiguous(), h.reshape(rows, width).contiguous()
    more = None if dh is None else dh.reshape(rows, width).contiguous()
    if way == "plain":
        return _plain_backward(h.shape, g, more, flat, weight, mean, rstd, centre)
    dx = torch.empty_like(flat)
    partial = torch.empty((max(min(rows, BLOCKS), 1), 2, width), dtype=torch.float32, device=h.device)
    weight = None if weight is None else weight.contiguous()
    if way == "triton":
        from flatout.kernels.layer_norm import in_triton

        in_triton.backward(g, more, flat, weight, mean, rstd, centre, dx, partial)
    else:
        SOURCE.launch(
            f"backward_{SUFFIX[h.dtype]}",
            (partial.shape[0],),
            _threads(width),
            (g, more, flat, weight, mean, rstd, dx, partial, rows, width, int(centre)),
            h.device,
            shared_bytes=8 * width,
        )
    of_weight, of_bias = partial.sum(0)
    return dx.view(h.shape), of_weight.clone(), of_bias.clone()


def _must_fit(x: Tensor, residual: Tensor | None, *of_columns: Tensor | None) -> None:
    """Check inputs: the kernels take addresses, so another shape, type or device would be misread."""
    for tensor, shape in ((residual, x.shape), *((each, x.shape[-1:]) for each in of_columns)):
        if tensor is not None and (
            tensor.shape != shape or tensor.dtype is not x.dtype or tensor.device != x.device
        ):
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}, but another input is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"it must have the type and device of x, and shape {tuple(shape)}"
            )


def best(x: Tensor) -> str:
    """The best implementation for this tensor: on a CPU, torch's own vectorised one."""
    width = x.shape[-1]
    if not x.is_cuda or x.dtype not in SUFFIX or not width:
        return "plain"
    return (
        "triton"
        if has_triton() and width <= TRITON_MAX_WIDTH
        else "cuda"
        if width <= CUDA_MAX_WIDTH
        else "plain"
    )


def _threads(width: int) -> int:
    return min(max((width + 3) // 4 + 31, 32) // 32 * 32, 256)


def _plain_forward(
    shape: object,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    centre: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = x if residual is None else x + residual
    kept = torch.float64 if h.dtype is torch.float64 else torch.float32
    v = h.to(
        kept
    )  # on a CPU, torch returns statistics of bfloat16 rows in bfloat16, too coarse for a gradient
    if centre and h.numel():
        wider, offset = (None if each is None else each.to(kept) for each in (weight, bias))
        y, mean, rstd = torch.ops.aten.native_layer_norm(v, (h.shape[-1],), wider, offset, eps)
    else:
        rstd = torch.rsqrt(v.square().mean(-1, keepdim=True) + eps)
        mean, y = torch.zeros_like(rstd), v * rstd
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
    return (
        y.to(h.dtype).view(shape),
        h.view(shape) if residual is not None else x.new_empty(0),
        mean.reshape(-1).clone(),
        rstd.reshape(-1).clone(),
    )


def _plain_backward(
    shape: object,
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    centre: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kept = mean.dtype
    if centre and h.numel():
        ones = h.new_ones(h.shape[-1], dtype=kept) if weight is None else weight.to(kept)
        d, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            dy.to(kept),
            h.to(kept),
            (h.shape[-1],),
            mean[:, None],
            rstd[:, None],
            ones,
            torch.zeros_like(ones),
            (True, True, True),
        )
        return (d if dh is None else d + dh).to(h.dtype).view(shape), of_weight, of_bias
    g, normal = dy.to(kept), (h.to(kept) - mean[:, None]) * rstd[:, None]
    of_weight, of_bias = (g * normal).sum(0), g.sum(0)
    if weight is not None:
        g = g * weight
    d = g - normal * (g * normal).mean(-1, keepdim=True)
    if centre:
        d = d - g.mean(-1, keepdim=True)
    d = d * rstd[:, None]
    return (d if dh is None else d + dh).to(h.dtype).view(shape), of_weight, of_bias


_forward = torch.library.custom_op("flatout::layer_norm", forward, mutates_args=())
_backward = torch.library.custom_op("flatout::layer_norm_backward", backward, mutates_args=())


@_forward.register_fake
def _(x, weight, bias, residual, eps, centre, implementation):
    kept = torch.float64 if x.dtype is torch.float64 else torch.float32
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    y = x.new_empty(x.shape)
    return (
        y,
        x.new_empty(x.shape) if residual is not None else x.new_empty(0),
        x.new_empty(rows, dtype=kept),
        x.new_empty(rows, dtype=kept),
    )


@_backward.register_fake
def _(dy, dh, h, weight, mean, rstd, centre, implementation):
    width = h.shape[-1]
    return h.new_empty(h.shape), h.new_empty(width, dtype=mean.dtype), h.new_empty(width, dtype=mean.dtype)


def _setup(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, _, ctx.centre, ctx.implementation = inputs
    _, h, mean, rstd = output
    ctx.has_residual = residual is not None
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(h if ctx.has_residual else x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)


def _gradient(ctx: FunctionCtx, dy: Tensor | None, dh: Tensor | None, *_: object) -> Any:
    h, weight, mean, rstd = ctx.saved_tensors
    if dy is None:  # only the sum was used
        return (
            None if not ctx.has_residual else dh,
            None,
            None,
            dh if ctx.has_residual else None,
            None,
            None,
            None,
        )
    dx, of_weight, of_bias = torch.ops.flatout.layer_norm_backward(
        dy, dh if ctx.has_residual else None, h, weight, mean, rstd, ctx.centre, ctx.implementation
    )
    return (
        dx,
        None if weight is None else of_weight.to(weight.dtype),
        None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype),
        dx if ctx.has_residual else None,
        None,
        None,
        None,
    )


_forward.register_autograd(_gradient, setup_context=_setup)
OPERATORS: dict[str, Any] = {"flatout::layer_norm": forward, "flatout::layer_norm_backward": backward}
