"""Crop, flip, scale to [0, 1] and normalise, as torchvision does image by image.

Like RandomCrop, RandomHorizontalFlip, ToTensor and Normalize:

    out[b, c, i, j] = (image[b, c, top_b + i - padding, left_b + j' - padding] / 255 - mean_c) / std_c
    j' = w - 1 - j if flipped
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


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
) -> Tensor:
    """[B, C, h, w] in ``dtype`` (float64 if mean is).

    images uint8, [B, C, H, W] or, with layout "hwc", [B, H, W, C]; top, left, flip [B]; mean, std [C].
    """
    height, width = size
    made = []
    for at, image in enumerate(images.permute(0, 3, 1, 2) if layout == "hwc" else images):
        padded = F.pad(image, [padding] * 4, value=fill)
        y, x = int(top[at]), int(left[at])
        part = padded[:, y : y + height, x : x + width]
        part = part.flip(-1) if bool(flip[at]) else part
        made.append(part.to(mean.dtype).div(255).sub(mean[:, None, None]).div(std[:, None, None]))
    channels = images.shape[-1 if layout == "hwc" else 1]
    batch = torch.stack(made) if made else mean.new_empty(0, channels, height, width)
    batch = batch if mean.dtype is torch.float64 else batch.to(dtype)
    return batch.contiguous(memory_format=torch.channels_last) if channels_last else batch
