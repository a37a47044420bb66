"""Takes the errors of a part of a batch to the whole batch.

Rounding differs from sample to sample, so its error shrinks with the number of samples; an error that is made
once per step does not. Which of the two it is, half of the part tells: twice the squared error of the part
less that of its half is what stays, whatever the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flatout.guard.captured_steps import CapturedCall, StepResults
from flatout.guard.copies import square


def in_whole_batch(
    part: tuple[StepResults, StepResults],
    half: tuple[StepResults, StepResults],
    share: float,
    summed: bool,
) -> float:
    """The error of a whole batch as a multiple of the error of a part of it.

    ``part`` and ``half``: the plain play and that of the levers, of a ``share`` of the samples and of half of
    it. ``summed``: gradients are sums over samples, and not means over those that are played. All parameters
    count alike, each relative to its gradient: the errors of one alone vary too much from step to step.
    """
    sizes = [square(tensor) for tensor in part[0].gradients[0]]
    of_part, of_half = (
        sum(square / size for square, size in zip(_squares(*plays), sizes, strict=True) if size > 0)
        for plays in (part, half)
    )
    if not (0.0 < of_part < math.inf and of_half < math.inf):
        return 1.0
    stays = min(1.0, max(0.0, 2.0 - (4.0 if summed else 1.0) * of_half / of_part))
    return math.sqrt(share + (1.0 - share) * stays)


def _squares(plain: StepResults, levers: StepResults) -> list[float]:
    """The mean squared difference over steps, for each parameter."""
    found = [0.0] * len(plain.gradients[0])
    for ours, theirs in zip(levers.gradients, plain.gradients, strict=True):
        for at, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if x is not None and y is not None:
                found[at] += square(x.double() - y.double()) / len(plain.gradients)
    return found


def are_summed(steps: Sequence[Sequence[CapturedCall]]) -> bool:
    """Whether gradients are sums over samples: the outputs have a batch dimension, and their gradients are given."""
    return any(grad.dim() for calls in steps for call in calls for grad in call.grads.values())
