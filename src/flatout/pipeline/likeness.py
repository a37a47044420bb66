"""Whether two batches are the same, and if not, in what they differ."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every byte: NaN equals itself, and zero is not minus zero."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    return torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))


def different(plain: Any, other: Any, apart: float) -> str:
    """Why two batches are not the same; nothing where they are, or where no value is farther away than allowed."""
    if type(plain) is not type(other):
        return f"it would give a {type(other).__name__} in place of a {type(plain).__name__}"
    if isinstance(plain, Tensor):
        if plain.dtype != other.dtype or plain.shape != other.shape or plain.stride() != other.stride():
            return f"a tensor would be {other.dtype} {tuple(other.shape)} and not {plain.dtype} {tuple(plain.shape)}"
        if same_bits(plain, other):
            return ""
        farthest = float((plain.double() - other.double()).abs().max()) if apart else float("inf")
        return "" if farthest <= apart * 1.001 else "its values differ from those of the transforms one by one"
    if isinstance(plain, dict):
        if plain.keys() != other.keys():
            return "it has other keys"
        return next((why for key in plain if (why := different(plain[key], other[key], apart))), "")
    if isinstance(plain, (list, tuple)):
        if len(plain) != len(other):
            return "it has another length"
        return next((why for a, b in zip(plain, other, strict=True) if (why := different(a, b, apart))), "")
    return "" if plain == other else "its values differ"
