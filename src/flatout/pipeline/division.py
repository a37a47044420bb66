"""Division by a number that rounds alike on every device."""

from __future__ import annotations

import torch


def divided(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """``tensor``, of a floating-point type and used nowhere else, divided in place by a number.

    A number of the host CUDA turns into its reciprocal and multiplies (BinaryDivTrueKernel.cu of torch 2.14): of the 256 bytes over 255, 126 then differ
    in the last bit from torchvision's on the CPU. By a tensor on its own device it divides.
    """
    return tensor.div_(torch.full((), by, dtype=tensor.dtype, device=tensor.device))
