"""silu_mul in Triton. Imported only if Triton is available.

One program takes BLOCK adjacent elements; the mask keeps the last program in bounds. Offsets are 64 bits
wide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _forward(a, b, y, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = offsets < count
    x = tl.load(a + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    z = tl.load(b + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    tl.store(y + offsets, (x / (1.0 + tl.exp(-x)) * z).to(y.dtype.element_ty), mask=in_bounds)


@triton.jit
def _backward(g, a, b, grad_a, grad_b, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = offsets < count
    x = tl.load(a + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    z = tl.load(b + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    d = tl.load(g + offsets, mask=in_bounds, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-x))
    tl.store(
        grad_a + offsets, (d * z * s * (1.0 + x * (1.0 - s))).to(grad_a.dtype.element_ty), mask=in_bounds
    )
    tl.store(grad_b + offsets, (d * x * s).to(grad_b.dtype.element_ty), mask=in_bounds)


def forward(a: Tensor, b: Tensor, y: Tensor) -> None:
    """Fills y. All contiguous, of one shape."""
    with torch.cuda.device_of(a):  # Triton launches on the current device
        _forward[(triton.cdiv(a.numel(), BLOCK),)](a, b, y, a.numel(), BLOCK=BLOCK)


def backward(g: Tensor, a: Tensor, b: Tensor, grad_a: Tensor, grad_b: Tensor) -> None:
    """Fills of_a and of_b."""
    with torch.cuda.device_of(a):
        _backward[(triton.cdiv(a.numel(), BLOCK),)](g, a, b, grad_a, grad_b, a.numel(), BLOCK=BLOCK)
