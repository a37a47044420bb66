"""Takes fewer samples of captured steps if steps take seconds, because a replica runs each step many times.

Its errors are then taken to the whole batch. Rounding differs from sample to sample, so its error shrinks with the number of samples; an error that is made
once per step does not. Which of the two it is, half of the part tells: twice the squared error of the part
less that of its half is what stays, whatever the number of samples.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from flatout.guard.captured_steps import CapturedCall, StepResults
from flatout.guard.copies import mapped_tensors, squared_norm
from flatout.measure.nests import tensors_in

STEPS_PER_REPLICA = 17  # executed for one verdict if steps are long
MAX_REPLICA_S = 12.0  # beyond this time, a replica runs only a part of the samples
# Batch normalisation needs several samples. And torch draws the same normal numbers in bfloat16 as in float32
# only if the number of elements is a multiple of 16 (CPU, torch 2.14).
MIN_SAMPLES = 16


def replica_samples(size: int, step_ms: float) -> int:
    """How many of ``size`` samples a replica runs: all, or at most half if a whole step takes too long."""
    possible = math.ceil(size * 1000 * MAX_REPLICA_S / (STEPS_PER_REPLICA * max(step_ms, 1.0)))
    count = MIN_SAMPLES * max(1, possible // MIN_SAMPLES)
    return size if 2 * count > size else count


def take_samples(
    steps: Sequence[list[CapturedCall]], step_ms: float, max_samples: int
) -> tuple[list[list[CapturedCall]], float]:
    """The same steps with their first samples, as many as the step time allows, and the share taken.

    The share is 1.0 if the steps stay whole. Inputs and output gradients must agree in the size of their
    first dimension, the batch size. Scalars stay as they are.
    """
    size = batch_size(steps)
    count = min(replica_samples(size, step_ms), max_samples)
    if not size or count == size:
        return list(steps), 1.0
    return first_samples(steps, count), count / size


def first_samples(steps: Sequence[list[CapturedCall]], count: int) -> list[list[CapturedCall]]:
    """The steps with their first ``count`` samples."""

    def first(nest: object) -> Any:
        return mapped_tensors(nest, lambda tensor: tensor[:count] if tensor.dim() else tensor)

    def shortened(call: CapturedCall) -> CapturedCall:
        parts = {name: first(getattr(call, name)) for name in ("args", "kwargs", "grads")}
        return replace(call, **parts, outside=None)

    return [list(map(shortened, calls)) for calls in steps]


def half_samples(steps: Sequence[list[CapturedCall]]) -> list[list[CapturedCall]]:
    """The first half of the samples of steps that `take_samples` has cut."""
    return first_samples(steps, batch_size(steps) // 2)


def batch_size(steps: Sequence[list[CapturedCall]]) -> int:
    """The size of the batches, or 0 if the steps do not agree in one."""
    sizes = set(_batch_sizes(steps))
    return sizes.pop() if len(sizes) == 1 else 0


def _batch_sizes(steps: Sequence[list[CapturedCall]]) -> Iterator[int]:
    for call in chain.from_iterable(steps):
        for tensor in tensors_in((call.args, call.kwargs, call.grads)):
            if tensor.dim():
                yield tensor.shape[0]


def whole_batch_factor(
    part: tuple[StepResults, StepResults], half: tuple[StepResults, StepResults], share: float, summed: bool
) -> float:
    """The error of a whole batch as a multiple of the error of a part of it.

    ``part`` and ``half``: the plain play and that of the levers, of a ``share`` of the samples and of half of
    it. ``summed``: gradients are sums over samples, and not means over those that are played. All parameters
    count alike, each relative to its gradient: the errors of one alone vary too much from step to step.
    """
    sizes = [squared_norm(tensor) for tensor in part[0].gradients[0]]
    part_error, half_error = (
        sum(square / size for square, size in zip(_squares(*plays), sizes, strict=True) if size > 0)
        for plays in (part, half)
    )
    if not (0.0 < part_error < math.inf and half_error < math.inf):
        return 1.0
    constant_share = min(1.0, max(0.0, 2.0 - (4.0 if summed else 1.0) * half_error / part_error))
    return math.sqrt(share + (1.0 - share) * constant_share)


def _squares(plain: StepResults, levers: StepResults) -> list[float]:
    """The mean squared difference over steps, for each parameter."""
    squares = [0.0] * len(plain.gradients[0])
    for lever_grads, plain_grads in zip(levers.gradients, plain.gradients, strict=True):
        for i, (x, y) in enumerate(zip(lever_grads, plain_grads, strict=True)):
            if x is not None and y is not None:
                squares[i] += squared_norm(x.double() - y.double()) / len(plain.gradients)
    return squares


def gradients_are_sums(steps: Sequence[Sequence[CapturedCall]]) -> bool:
    """Whether gradients are sums over samples: the outputs have a batch dimension, and their gradients are given."""
    return any(grad.dim() for calls in steps for call in calls for grad in call.grads.values())
