"""Layer normalisation in Triton. Imported only if Triton is available.

One program per row keeps the row in registers. Shapes: R rows, N columns, P programs that share the rows in
the backward pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(
    x, weight, bias, y, mean, rstd, width, eps, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    offsets = row * width + columns
    v = tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32)
    m = tl.sum(v, axis=0) / width
    centred = tl.where(inside, v - m, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)
    out = centred * r
    if WEIGHT:
        out = out * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        out = out + tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + offsets, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy, x, weight, mean, rstd, dx, partial, rows, width, WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    grad_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    grad_bias = tl.zeros((BLOCK,), dtype=tl.float32)
    w = tl.full((BLOCK,), 1.0, dtype=tl.float32)
    if WEIGHT:
        w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        offsets = row * width + columns
        g = tl.load(dy + offsets, mask=inside, other=0.0).to(tl.float32)
        normal = (
            tl.load(x + offsets, mask=inside, other=0.0).to(tl.float32) - tl.load(mean + row)
        ) * tl.load(rstd + row)
        normal = tl.where(inside, normal, 0.0)
        grad_weight += g * normal
        grad_bias += g
        g = g * w
        d = g - normal * (tl.sum(g * normal, axis=0) / width) - tl.sum(g, axis=0) / width
        d = d * tl.load(rstd + row)
        tl.store(dx + offsets, d.to(dx.dtype.element_ty), mask=inside)
    tl.store(partial + program * 2 * width + columns, grad_weight, mask=inside)
    tl.store(partial + program * 2 * width + width + columns, grad_bias, mask=inside)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    y: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> None:
    """Fills y [R, N] and mean, rstd [R]."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):  # Triton launches on the current device
        _forward[(rows,)](
            x,
            weight,
            bias,
            y,
            mean,
            rstd,
            width,
            eps,
            WEIGHT=weight is not None,
            BIAS=bias is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    partial: torch.Tensor,
) -> None:
    """Fills dx [R, N] and partial [P, 2, N]: sums for weight and bias over the rows of each program."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    with torch.cuda.device_of(x):
        _backward[(partial.shape[0],)](
            dy,
            x,
            weight,
            mean,
            rstd,
            dx,
            partial,
            rows,
            width,
            WEIGHT=weight is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)
