"""The numeric resolution of a run: significant bits of losses; flushed, coarse or saturated tensors.

Half precision is sound if only products are rounded to it, and the loss and the sums stay in float32. A
bfloat16 number has 8 significant bits and a float16 number 11. So a gradient that results from a product may
have 8; a loss may not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SHORT_BITS = 10  # true of all bfloat16 losses, half of float16's, one in 8,192 of float32's
SHORT_SHARE = 0.25  # of the losses, beyond the plain program; detects one half-precision loss among three
FEW_BITS = 5  # of a gradient: true of one in eight of bfloat16's, and every number of an 8-bit format
FEW_BITS_SHARE = 0.4  # sound: up to 0.22
FLUSHED_SHARE = 0.05  # sound: up to 0.0005
SATURATED_SHARE = 0.25  # sound: up to 0.03
MIN_ELEMENTS = 64  # in a tensor whose elements are counted
NEGLIGIBLE = 2.0**-24  # share of the largest element: a sum in float32 loses it anyway


def significant_bits(value: float) -> int:
    """The bits from the first to the last set bit of the mantissa; 0 for zero and non-finite values."""
    if not math.isfinite(value) or value == 0:
        return 0
    mantissa = int(abs(math.frexp(value)[0]) * 2.0**53)
    return mantissa.bit_length() - ((mantissa & -mantissa).bit_length() - 1)


def coarse_share(runs: Sequence[Sequence[float]]) -> float:
    """The share of losses with few significant bits, or repeated within a run, whichever is larger."""
    count = sum(map(len, runs))
    if not count:
        return 0.0
    short = sum(significant_bits(x) <= SHORT_BITS for run in runs for x in run)
    repeated = sum(len(run) - len(set(run)) for run in runs)
    return max(short, repeated) / count


def resolution_checks(plain: Any, levers: Any, torch: ModuleType) -> list[tuple[str, float, float, str]]:
    """``(name, value, limit, why)`` of checks on the resolution of the second of two plays of the same steps.

    Each value is a share beyond that of the plain play (``replay.Played``): of the losses among the outputs,
    or of the elements of the worst tensor.
    """
    gradients = list(_pairs(plain.gradients, levers.gradients))
    both = [*_pairs(plain.outputs, levers.outputs), *gradients]
    short = max(0.0, _short_losses(levers) - _short_losses(plain))
    flushed = max((_flushed(p, x) for p, x in gradients), default=0.0)
    few_bits = max((_few_bits(x, torch) - _few_bits(p, torch) for p, x in gradients), default=0.0)
    saturated = max((_saturated(x) - _saturated(p) for p, x in both), default=0.0)
    few_bits, saturated = max(0.0, few_bits), max(0.0, saturated)
    of_gradient = "of the elements of one gradient"
    rows = (
        (
            "resolution",
            short,
            SHORT_SHARE,
            f"of the losses that the module computes have at most {SHORT_BITS} significant bits",
        ),
        ("flushed", flushed, FLUSHED_SHARE, f"{of_gradient} are zero, but not in the plain step"),
        ("bits", few_bits, FEW_BITS_SHARE, f"{of_gradient} have at most {FEW_BITS} significant bits"),
        (
            "saturated",
            saturated,
            SATURATED_SHARE,
            "of the elements of one tensor are its largest or smallest value",
        ),
    )
    return [(name, value, limit, f"{value:.0%} {what}") for name, value, limit, what in rows]


def _short_losses(played: Any) -> float:
    """The share of losses with few bits.

    Losses are outputs without a dimension: an output of a batch of one has one.
    """
    scalars = [float(out) for outputs in played.outputs for out in outputs if out.dim() == 0]
    return sum(significant_bits(x) <= SHORT_BITS for x in scalars) / len(scalars) if scalars else 0.0


def _pairs(plain: Sequence[Sequence[Any]], levers: Sequence[Sequence[Any]]) -> Iterator[tuple[Any, Any]]:
    for x, y in zip(plain, levers, strict=True):
        for p, other in zip(x, y, strict=False):
            if p is not None and other is not None and p.shape == other.shape and p.numel() >= MIN_ELEMENTS:
                yield p, other


def _flushed(plain: Tensor, levers: Tensor) -> float:
    """The share of zeros that the plain gradient does not have, minus the zeros that only it has.

    An activation near its kink may be on either side.
    """
    counted = plain.abs() > NEGLIGIBLE * plain.abs().max()
    if int(counted.sum()) < MIN_ELEMENTS:
        return 0.0
    newly_zero = int(((levers == 0) & counted).sum()) - int(((plain == 0) & (levers != 0)).sum())
    return max(0, newly_zero) / int(counted.sum())


def _few_bits(x: Tensor, torch: ModuleType) -> float:
    x = x[(x != 0) & x.isfinite()]
    if x.numel() < MIN_ELEMENTS:
        return 0.0
    scaled = torch.frexp(x.float())[0] * 2**FEW_BITS
    return float((scaled == scaled.round()).float().mean())


def _saturated(x: Tensor) -> float:
    x = x[x.isfinite()]
    return (
        max(float((x == x.max()).float().mean()), float((x == x.min()).float().mean()))
        if x.numel() >= MIN_ELEMENTS
        else 0.0
    )
