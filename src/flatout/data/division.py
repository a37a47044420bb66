"""Division by a number, with the same rounding on every device."""

from __future__ import annotations

import torch


def divide_in_place(tensor: torch.Tensor, by: float) -> torch.Tensor:
    """Divide a floating-point tensor in place by a number. Nothing else may use the tensor.

    For a host number, CUDA multiplies by its reciprocal (BinaryDivTrueKernel.cu of torch 2.14). Of the 256
    byte values divided by 255, 126 then differ from torchvision's CPU result in the last bit. With a tensor
    on the same device as divisor, CUDA divides.
    """
    return tensor.div_(torch.full((), by, dtype=tensor.dtype, device=tensor.device))
