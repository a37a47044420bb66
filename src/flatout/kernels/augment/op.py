"""The public operator: normalise a batch of uint8 images, in one pass on a GPU and few on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.kernels.cuda import SUFFIX, CudaSource
from flatout.kernels.kernel import has_triton

SOURCE = CudaSource(Path(__file__).with_name("kernel.cu"))
THREADS = 256
BLOCKS_AN_IMAGE = 64  # at most; each block loops
MAX_CHANNELS = 48  # their tables fit into 48 KiB of shared memory
# Elements of one image, in or out: counted in 32 bits, and in blocks of 1,024, of which a grid holds 65,535.
MAX_IMAGE = 65535 * 1024


def augment(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    flip: Tensor,
    size: list[int],
    mean: Tensor,
    std: Tensor,
    padding: int = 0,
    fill: int = 0,
    dtype: torch.dtype = torch.float32,
    layout: str = "chw",
    channels_last: bool = False,
    implementation: str = "",
) -> Tensor:
    """Crop, flip, (x / 255 - mean) / std: [B, C, h, w] in ``dtype``.

    With ``channels_last``, the result is in memory as [B, h, w, C]. images uint8, [B, C, H, W] or, with
    ``layout`` "hwc", [B, H, W, C]; ``size`` (h, w). top and left [B] are corners in the image padded by
    ``padding`` pixels of ``fill``, as RandomCrop draws them; pixels outside it are ``fill`` too. flip [B] of
    bool; mean, std [C] in float32, on the images' device. float32 gives torchvision's bits. No gradients.
    Raises ValueError for inputs that do not match.
    """
    if images.dtype is not torch.uint8 or images.dim() != 4 or layout not in ("chw", "hwc"):
        raise ValueError(
            f"images are {images.dtype} {tuple(images.shape)} in layout {layout!r}, but must be uint8 [B, C, H, W] (chw) or [B, H, W, C] (hwc)"
        )
    channels = images.shape[3 if layout == "hwc" else 1]
    if not len(images) == len(top) == len(left) == len(flip) or not channels == len(mean) == len(std):
        raise ValueError(
            f"{len(images)} images have {len(top)}, {len(left)} corners and {len(flip)} flips; {channels} channels, {len(mean)} means and "
            f"{len(std)} deviations"
        )
    if (
        any(each.device != images.device for each in (top, left, flip, mean, std))
        or not mean.dtype is std.dtype is torch.float32
    ):
        raise ValueError(
            f"corners, flips, mean and std must be on {images.device} like the images, and mean and std must be float32"
        )
    result: Tensor = torch.ops.flatout.augment(
        images, top, left, flip, size, mean, std, padding, fill, dtype, layout, channels_last, implementation
    )
    return result


def _launch(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    flip: Tensor,
    table: Tensor,
    out: Tensor,
    padding: int,
    fill: int,
    hwc: bool,
) -> None:
    """Run the CUDA kernel. All tensors are contiguous; ``out`` may be channels_last."""
    batch, channels, *size = out.shape
    height, width = images.shape[1:3] if hwc else images.shape[2:4]
    channels_last = not out.is_contiguous()
    blocks = min(max(out[0].numel() // (THREADS * 8), 1), BLOCKS_AN_IMAGE)
    SOURCE.launch(
        f"augment_{SUFFIX[out.dtype]}",
        (batch, blocks),
        THREADS,
        (
            images,
            top,
            left,
            flip,
            table,
            out,
            height,
            width,
            channels,
            size[0],
            size[1],
            padding,
            fill,
            int(hwc),
            int(channels_last),
        ),
        images.device,
        shared_bytes=4 * 256 * channels,
    )


def forward(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    flip: Tensor,
    size: list[int],
    mean: Tensor,
    std: Tensor,
    padding: int,
    fill: int,
    dtype: torch.dtype,
    layout: str,
    channels_last: bool,
    implementation: str,
) -> Tensor:
    hwc = layout == "hwc"
    batch, channels, height, width = (images.shape[i] for i in ((0, 3, 1, 2) if hwc else (0, 1, 2, 3)))
    table = _table(mean, std)
    shape = (batch, channels, size[0], size[1])
    way = implementation or best(images, channels, size, dtype)
    if way == "plain":
        return _plain(images, top, left, flip, shape, mean, std, padding, fill, dtype, hwc, channels_last)
    out = torch.empty(
        shape,
        dtype=dtype,
        device=images.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )
    if not out.numel():
        return out
    images, top, left, flip = (
        images.contiguous(),
        top.long().contiguous(),
        left.long().contiguous(),
        flip.to(torch.uint8).contiguous(),
    )
    if way == "triton":
        from flatout.kernels.augment import in_triton

        in_triton.augment(
            images,
            top,
            left,
            flip,
            table,
            out,
            (channels, height, width),
            (size[0], size[1]),
            padding,
            fill,
            hwc,
            channels_last,
        )
    else:
        _launch(images, top, left, flip, table, out, padding, fill, hwc)
    return out


def best(images: Tensor, channels: int, size: list[int], dtype: torch.dtype) -> str:
    """The best implementation for these images."""
    if (
        not images.is_cuda
        or dtype not in SUFFIX
        or max(channels * size[0] * size[1], images[0].numel() if len(images) else 0) > MAX_IMAGE
    ):
        return "plain"
    return "triton" if has_triton() else "cuda" if channels <= MAX_CHANNELS else "plain"


def _table(mean: Tensor, std: Tensor) -> Tensor:
    """[C, 256]: the result for each byte, by torchvision's own operations in their order."""
    byte = torch.arange(256, dtype=torch.float32, device=mean.device)
    return byte.div(_white(mean)).sub(mean[:, None]).div(std[:, None])


def _white(like: Tensor) -> Tensor:
    """255 on the device.

    CUDA would multiply by the reciprocal of a host number, and round differently (BinaryDivTrueKernel.cu of
    torch 2.14).
    """
    return torch.full((), 255.0, device=like.device)


def _plain(
    images: Tensor,
    top: Tensor,
    left: Tensor,
    flip: Tensor,
    shape: tuple[int, int, int, int],
    mean: Tensor,
    std: Tensor,
    padding: int,
    fill: int,
    dtype: torch.dtype,
    hwc: bool,
    channels_last: bool,
) -> Tensor:
    """Gather the crops as bytes in the order of the output, then compute once, in place, over the batch."""
    batch, _, height, width = shape
    seen = images.permute(0, 3, 1, 2) if hwc else images
    far = max([padding, *(int(part) for part in _beyond(top, left, shape, seen, padding))]) if batch else 0
    layout = torch.channels_last if channels_last else torch.contiguous_format
    crops = torch.empty(shape, dtype=torch.uint8, device=images.device, memory_format=layout)
    more = far - padding
    for at, (y, x, mirrored) in enumerate(zip(top.tolist(), left.tolist(), flip.tolist(), strict=True)):
        image = F.pad(seen[at], [far] * 4, value=fill) if far else seen[at]
        part = image[:, y + more : y + more + height, x + more : x + more + width]
        crops[at] = part.flip(-1) if mirrored else part
    made = crops.to(torch.float32).div_(_white(mean)).sub_(mean[:, None, None]).div_(std[:, None, None])
    return made.to(dtype)


def _beyond(
    top: Tensor, left: Tensor, shape: tuple[int, int, int, int], images: Tensor, padding: int
) -> list[Tensor]:
    """How far crops extend over each border of the image."""
    _, _, height, width = shape
    return [
        (padding - top).max(),
        (padding - left).max(),
        (top + height - padding - images.shape[2]).max(),
        (left + width - padding - images.shape[3]).max(),
    ]


_operator = torch.library.custom_op("flatout::augment", forward, mutates_args=())


@_operator.register_fake
def _(images, top, left, flip, size, mean, std, padding, fill, dtype, layout, channels_last, implementation):
    channels = images.shape[3 if layout == "hwc" else 1]
    return torch.empty(
        (images.shape[0], channels, size[0], size[1]),
        dtype=dtype,
        device=images.device,
        memory_format=torch.channels_last if channels_last else torch.contiguous_format,
    )


OPERATORS: dict[str, Any] = {"flatout::augment": forward}
