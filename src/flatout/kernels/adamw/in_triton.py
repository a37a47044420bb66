"""One step of AdamW over chunks of many tensors in Triton, in one launch.

Imported only if Triton is available.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _step(table, rate, of_mean, beta2, of_square, eps, decay, root, T: tl.constexpr, BLOCK: tl.constexpr):
    chunk = table + tl.program_id(0).to(tl.int64) * 5
    p = tl.load(chunk).to(tl.pointer_type(T))
    g = tl.load(chunk + 1).to(tl.pointer_type(T))
    m = tl.load(chunk + 2).to(tl.pointer_type(tl.float32))
    v = tl.load(chunk + 3).to(tl.pointer_type(tl.float32))
    count = tl.load(chunk + 4)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        x = tl.load(p + at, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(g + at, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(m + at, mask=inside, other=0.0)
        square = tl.load(v + at, mask=inside, other=0.0)
        mean += of_mean * (slope - mean)
        square = beta2 * square + of_square * slope * slope
        x = x * decay - rate * mean / (tl.sqrt(square) / root + eps)
        tl.store(p + at, x.to(T), mask=inside)
        tl.store(m + at, mean, mask=inside)
        tl.store(v + at, square, mask=inside)


TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def step(table: torch.Tensor, dtype: torch.dtype, *numbers: float) -> None:
    """``table`` [chunks, 5]: addresses and lengths. Parameters have type ``dtype``, moments float32."""
    with torch.cuda.device_of(table):  # Triton launches on the current device
        _step[(len(table),)](table, *numbers, T=TYPES[dtype], BLOCK=BLOCK)
