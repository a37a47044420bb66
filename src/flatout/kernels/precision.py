"""The allowed distance of a result from float64.

Two things round: the storage type, once or a few times per output (relative to that output), and the sums,
which are kept in float32 or better (relative to the largest output). n random roundings add up like sqrt(n):
Higham & Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019. So

    |got - float64|  <=  ulps * u(dtype) * |float64|
                         +  (inside * u(dtype) + SLACK * u(sums) * (1 + sqrt(terms))) * max |float64|

``inside`` counts the values inside the formula that are rounded to the storage type before further use, and u
is the unit roundoff. No limit is tuned by hand for a kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

SLACK = 8.0
UNIT_ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}
SMALLEST = {
    torch.float16: 2.0**-24,
    torch.bfloat16: 2.0**-133,
    torch.float32: 2.0**-149,
    torch.float64: 5e-324,
}  # subnormals


@dataclass(frozen=True)
class Distance:
    """``share`` is the largest error as a share of the allowed error; at most 1 passes."""

    share: float
    where: tuple[int, ...]
    got: float
    expected: float


def distance(
    got: torch.Tensor,
    expected: torch.Tensor,
    terms: int,
    ulps: float,
    inside: float = 0.0,
    stored: torch.dtype | None = None,
) -> Distance:
    """The distance of ``got`` from the float64 tensor ``expected`` of the same shape.

    NaN equals only NaN, and an infinity only itself. ``stored`` is the type of the inputs, if coarser than
    the result's.
    """
    if got.numel() == 0:
        return Distance(0.0, (), 0.0, 0.0)
    sums = torch.float64 if got.dtype is torch.float64 else torch.float32
    ours = got.detach().to("cpu", torch.float64)
    expected = expected.detach().to("cpu", torch.float64)
    same = (ours == expected) | (ours.isnan() & expected.isnan())
    finite = expected.isfinite()
    scale = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
    u = max(UNIT_ROUNDOFF[got.dtype], UNIT_ROUNDOFF[stored or got.dtype])
    allowed = (
        ulps * u * expected.abs()
        + (inside * u + SLACK * UNIT_ROUNDOFF[sums] * (1 + math.sqrt(terms))) * scale
    )
    share = torch.where(same, 0.0, (ours - expected).abs() / (allowed + SMALLEST[got.dtype]))
    share = torch.where(share.isnan(), math.inf, share)
    at = int(share.argmax())
    where = (
        tuple(int(i) for i in torch.unravel_index(torch.tensor(at, device="cpu"), share.shape))
        if share.dim()
        else ()
    )
    return Distance(
        float(share.flatten()[at]), where, float(ours.flatten()[at]), float(expected.flatten()[at])
    )
