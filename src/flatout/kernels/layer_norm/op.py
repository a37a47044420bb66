"""The public function and its torch.library operators with gradient and fake.

``implementation`` is "" (the best for the given tensors) or a name. Rows are made contiguous here, once;
everything below sees x as [R, N].
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from flatout.kernels.kernel import has_triton

TYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_WIDTH = 16384  # a row must fit into the registers of one program
MAX_BLOCKS = 256  # most blocks of the backward pass: their partial sums take BLOCKS * N * 8 bytes


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    implementation: str = "",
) -> Tensor:
    """Layer normalisation over the last axis.

    x [..., N]; weight, bias [N], of x's type. ``implementation``: "" (the best for these tensors), "plain",
    "triton". Differentiable once. Raises ValueError for inputs that do not match.
    Source: Ba, Kiros and Hinton, Layer Normalization, 2016.
    """
    columns = x.shape[-1:]
    for tensor in (weight, bias):
        # The kernels take addresses, so another shape, type or device would be misread.
        if tensor is not None and (
            tensor.shape != columns or tensor.dtype is not x.dtype or tensor.device != x.device
        ):
            raise ValueError(
                f"x is {x.dtype} {tuple(x.shape)} on {x.device}, but another input is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}; "
                f"it must have the type and device of x, and shape {tuple(columns)}"
            )
    y: Tensor
    y, _, _ = torch.ops.flatout.layer_norm(x, weight, bias, eps, implementation)
    return y


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, implementation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """y in x's shape; mean and rstd [R] in float32 (float64 for float64)."""
    flat = _rows(x)
    if (implementation or best(x)) == "plain":
        return _plain_forward(x.shape, flat, weight, bias, eps)
    from flatout.kernels.layer_norm import in_triton

    y = torch.empty_like(flat)
    mean, rstd = (torch.empty(len(flat), dtype=torch.float32, device=x.device) for _ in range(2))
    weight, bias = (None if tensor is None else tensor.contiguous() for tensor in (weight, bias))
    if len(flat):
        in_triton.forward(flat, weight, bias, eps, y, mean, rstd)
    return y.view(x.shape), mean, rstd


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, implementation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias; the last two [N], in float32 or better."""
    flat_dy, flat = _rows(dy), _rows(x)
    if (implementation or best(x)) == "plain":
        return _plain_backward(x.shape, flat_dy, flat, weight, mean, rstd)
    from flatout.kernels.layer_norm import in_triton

    rows, width = flat.shape
    dx = torch.empty_like(flat)
    partial = torch.empty((max(min(rows, MAX_BLOCKS), 1), 2, width), dtype=torch.float32, device=x.device)
    in_triton.backward(
        flat_dy, flat, None if weight is None else weight.contiguous(), mean, rstd, dx, partial
    )
    grad_weight, grad_bias = partial.sum(0)
    return dx.view(x.shape), grad_weight.clone(), grad_bias.clone()


def best(x: Tensor) -> str:
    """The best implementation for this tensor: on a CPU, torch's own vectorised one."""
    suited = x.is_cuda and x.dtype in TYPES and 0 < x.shape[-1] <= MAX_WIDTH
    return "triton" if suited and has_triton() else "plain"


def _rows(tensor: Tensor) -> Tensor:
    width = tensor.shape[-1]
    return tensor.reshape(tensor.numel() // width if width else 0, width).contiguous()


def _plain_forward(
    shape: torch.Size, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    # On a CPU, torch returns statistics of bfloat16 rows in bfloat16, too coarse for a gradient.
    sum_dtype = torch.promote_types(x.dtype, torch.float32)
    wide = (None if tensor is None else tensor.to(sum_dtype) for tensor in (weight, bias))
    y, mean, rstd = torch.ops.aten.native_layer_norm(x.to(sum_dtype), (x.shape[-1],), *wide, eps)
    return y.to(x.dtype).view(shape), mean.flatten(), rstd.flatten()


def _plain_backward(
    shape: torch.Size, dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    sum_dtype, width = mean.dtype, x.shape[-1]
    scale = x.new_ones(width, dtype=sum_dtype) if weight is None else weight.to(sum_dtype)
    dx, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        dy.to(sum_dtype),
        x.to(sum_dtype),
        (width,),
        mean[:, None],
        rstd[:, None],
        scale,
        torch.zeros_like(scale),
        (True, True, True),
    )
    return dx.to(x.dtype).view(shape), grad_weight, grad_bias


_forward = torch.library.custom_op("flatout::layer_norm", forward, mutates_args=())
_backward = torch.library.custom_op("flatout::layer_norm_backward", backward, mutates_args=())


@_forward.register_fake
def _(x, weight, bias, eps, implementation):
    rows = x.numel() // x.shape[-1] if x.shape[-1] else 0
    mean, rstd = (x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32)) for _ in range(2))
    return x.new_empty(x.shape), mean, rstd


@_backward.register_fake
def _(dy, x, weight, mean, rstd, implementation):
    grad_weight, grad_bias = (x.new_empty(x.shape[-1], dtype=mean.dtype) for _ in range(2))
    return x.new_empty(x.shape), grad_weight, grad_bias


def _setup(ctx: FunctionCtx, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.implementation = inputs
    _, mean, rstd = output
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _gradient(ctx: FunctionCtx, dy: Tensor, *_: object) -> Any:
    x, weight, mean, rstd = ctx.saved_tensors
    dx, grad_weight, grad_bias = torch.ops.flatout.layer_norm_backward(
        dy, x, weight, mean, rstd, ctx.implementation
    )
    grad_weight = None if weight is None else grad_weight.to(weight.dtype)
    grad_bias = None if ctx.bias_dtype is None else grad_bias.to(ctx.bias_dtype)
    return dx, grad_weight, grad_bias, None, None


_forward.register_autograd(_gradient, setup_context=_setup)
OPERATORS: dict[str, Any] = {"flatout::layer_norm": forward, "flatout::layer_norm_backward": backward}
