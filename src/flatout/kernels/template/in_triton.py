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
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, (x / (1.0 + tl.exp(-x)) * z).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(g, a, b, of_a, of_b, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    x = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    z = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-x))
    tl.store(of_a + at, (d * z * s * (1.0 + x * (1.0 - s))).to(of_a.dtype.element_ty), mask=inside)
    tl.store(of_b + at, (d * x * s).to(of_b.dtype.element_ty), mask=inside)


def forward(a: Tensor, b: Tensor, y: Tensor) -> None:
    """Fills y. All contiguous, of one shape."""
    with torch.cuda.device_of(a):  # Triton launches on the current device
        _forward[(triton.cdiv(a.numel(), BLOCK),)](a, b, y, a.numel(), BLOCK=BLOCK)


def backward(g: Tensor, a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor) -> None:
    """Fills of_a and of_b."""
    with torch.cuda.device_of(a):
        _backward[(triton.cdiv(a.numel(), BLOCK),)](g, a, b, of_a, of_b, a.numel(), BLOCK=BLOCK)
