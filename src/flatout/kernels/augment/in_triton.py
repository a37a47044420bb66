"""The augment kernel in Triton. Imported only if Triton is available."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _augment(
    images,
    top,
    left,
    flip,
    table,
    out,
    H,
    W,
    C,
    h,
    w,
    padding,
    fill,
    HWC: tl.constexpr,
    CHANNELS_LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)  # 64 bits: a data set on the device is larger than 2^31 bytes
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < C * h * w
    if CHANNELS_LAST:
        c = at % C
        pixel = at // C
    else:
        c = at // (h * w)
        pixel = at % (h * w)
    j = pixel % w
    j = tl.where(tl.load(flip + image) != 0, w - 1 - j, j)
    y = pixel // w + tl.load(top + image) - padding
    x = j + tl.load(left + image) - padding
    held = inside & (y >= 0) & (y < H) & (x >= 0) & (x < W)
    source = (y * W + x) * C + c if HWC else (c * H + y) * W + x
    byte = tl.load(images + image * (C * H * W) + source, mask=held, other=0).to(tl.int32)
    byte = tl.where(held, byte, fill)
    value = tl.load(table + c * 256 + byte, mask=inside, other=0.0)
    tl.store(out + image * (C * h * w) + at, value.to(out.dtype.element_ty), mask=inside)


def augment(
    images: torch.Tensor,
    top: torch.Tensor,
    left: torch.Tensor,
    flip: torch.Tensor,
    table: torch.Tensor,
    out: torch.Tensor,
    source: tuple[int, int, int],
    size: tuple[int, int],
    padding: int,
    fill: int,
    hwc: bool,
    channels_last: bool,
) -> None:
    """Fills ``out`` in its memory order. ``source`` is (C, H, W) of the images, table [C, 256]."""
    channels, height, width = source
    blocks = triton.cdiv(channels * size[0] * size[1], BLOCK)
    with torch.cuda.device_of(images):  # Triton launches on the current device
        _augment[(len(images), blocks)](
            images,
            top,
            left,
            flip,
            table,
            out,
            height,
            width,
            channels,
            *size,
            padding,
            fill,
            HWC=hwc,
            CHANNELS_LAST=channels_last,
            BLOCK=BLOCK,
        )
