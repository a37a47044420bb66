"""The definition of silu_mul in plain torch. Works in float64; every implementation is compared with it."""

from __future__ import annotations

from torch import Tensor


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b = a / (1 + exp(-a)) * b, for a and b of one shape."""
    return a / (1 + (-a).exp()) * b
