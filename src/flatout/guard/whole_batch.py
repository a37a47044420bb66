"""Takes the errors of a share of a batch to the whole batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

CHANCE = 2.0  # standard deviations of the cosine of two independent vectors


def in_whole_batch(errors: Sequence[Sequence[Any]], share: float) -> float:
    """The error of a whole batch as a multiple of the error of a ``share`` of it.

    ``errors``: those of each step, per parameter. Errors that differ from sample to sample shrink with the
    square root of the number of samples. What two steps have in common does not: it is their mean product,
    less what independent errors of as many elements have in common by chance.
    """
    squares = [sum(float(e.double().square().sum()) for e in step if e is not None) for step in errors]
    total = sum(squares) / len(squares)
    if share == 1.0 or len(errors) < 2 or not 0.0 < total < math.inf:
        return 1.0
    products = [
        sum(float((a * b).sum()) for a, b in zip(one, other, strict=True) if a is not None and b is not None)
        for one, other in pairwise(errors)
    ]
    elements = sum(e.numel() for e in errors[0] if e is not None)
    common = sum(products) / len(products) / total - CHANCE / math.sqrt(max(1, elements))
    return math.sqrt(share + (1.0 - share) * min(1.0, max(0.0, common)))
