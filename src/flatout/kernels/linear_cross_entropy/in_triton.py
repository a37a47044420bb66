"""Losses of a chunk of rows of logits in Triton; their gradients replace the logits.

Imported only if Triton is available.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_BLOCK = 8192  # columns in registers at a time; more spills


@triton.jit
def _losses(
    logits,
    target,
    loss,
    classes,
    columns,
    ignore_index,
    smoothing,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * columns
    right = tl.load(target + row)
    counts = right != ignore_index
    most = -float("inf")
    total = 0.0
    plain = 0.0
    of_right = 0.0
    for first in range(0, classes, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < classes
        v = tl.load(start + at, mask=inside, other=-float("inf")).to(tl.float32)
        local = tl.maximum(most, tl.max(v, axis=0))
        # All of a row may be minus infinity so far: avoid (-inf) - (-inf).
        safe = tl.where(local == -float("inf"), 0.0, local)
        total = total * tl.exp(most - safe) + tl.sum(tl.exp(v - safe), axis=0)
        most = local
        plain += tl.sum(tl.where(inside, v, 0.0), axis=0)
        of_right += tl.sum(tl.where(at == right, v, 0.0), axis=0)
    log_sum = most + tl.log(total)
    one = log_sum - (1.0 - smoothing) * of_right
    if smoothing > 0.0:
        one -= smoothing * plain / classes
    # An invalid class gives a NaN loss; torch aborts on the device.
    one = tl.where((right < 0) | (right >= classes), float("nan"), one)
    tl.store(loss + row, tl.where(counts, one, 0.0))
    if GRADIENT:
        for first in range(0, columns, BLOCK):
            at = first + tl.arange(0, BLOCK)
            v = tl.load(start + at, mask=at < classes, other=-float("inf")).to(tl.float32)
            g = tl.exp(v - log_sum) - smoothing / classes - tl.where(at == right, 1.0 - smoothing, 0.0)
            tl.store(
                start + at,
                tl.where(counts & (at < classes), g, 0.0).to(logits.dtype.element_ty),
                mask=at < columns,
            )


def losses(
    logits: torch.Tensor,
    classes: int,
    target: torch.Tensor,
    loss: torch.Tensor,
    ignore_index: int,
    smoothing: float,
    gradient: bool,
) -> None:
    """Fills loss [n] in float32; with ``gradient``, replaces logits [n, V or more] by their gradients.

    Gradients beyond the classes are zeros.
    """
    rows, columns = logits.shape
    block = min(triton.next_power_of_2(classes), MAX_BLOCK)
    with torch.cuda.device_of(logits):  # Triton launches on the current device
        _losses[(rows,)](
            logits,
            target,
            loss,
            classes,
            columns,
            ignore_index,
            smoothing,
            GRADIENT=gradient,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
