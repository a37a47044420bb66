"""Take fewer samples of captured steps if steps take seconds, because a replica runs each step many times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.guard.copies import mapped_tensors
from flatout.measure.nests import tensors_in

if TYPE_CHECKING:
    from flatout.guard.captured_steps import CapturedCall

PLAYS = 17  # steps per judgement if steps are long
LONGEST_PLAYS_S = 12.0  # beyond this time, only part of the samples is played
# Batch normalisation needs several samples. And torch draws the same normal numbers in bfloat16 as in float32
# only if the number of elements is a multiple of 16 (CPU, torch 2.14).
FEWEST_SAMPLES = 16


def samples_played(size: int, step_ms: float) -> int:
    """How many of ``size`` samples to play: all, or at most half if a whole step takes too long."""
    possible = math.ceil(size * 1000 * LONGEST_PLAYS_S / (PLAYS * max(step_ms, 1.0)))
    kept = FEWEST_SAMPLES * max(1, possible // FEWEST_SAMPLES)
    return size if 2 * kept > size else kept


def sliced(
    steps: Sequence[list[CapturedCall]], step_ms: float, torch: ModuleType
) -> tuple[list[list[CapturedCall]], float]:
    """The same steps with their first samples, as many as the step time allows, and the share taken.

    The share is 1.0 if the steps stay whole. Inputs and output gradients must agree in the size of their
    first dimension, the batch size. Scalars stay as they are.
    """
    tensors = [
        tensor
        for calls in steps
        for call in calls
        for tensor in tensors_in((call.args, call.kwargs, call.grads))
    ]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    size = next(iter(sizes), 0)
    kept = samples_played(size, step_ms)
    if len(sizes) != 1 or kept == size:
        return list(steps), 1.0

    return first_samples(steps, kept, torch), kept / size


def first_samples(
    steps: Sequence[list[CapturedCall]], kept: int, torch: ModuleType
) -> list[list[CapturedCall]]:
    """The steps with their first ``kept`` samples."""

    def first(thing: object) -> Any:
        return mapped_tensors(thing, lambda tensor: tensor[:kept] if tensor.dim() else tensor)

    return [
        [
            replace(call, args=first(call.args), kwargs=first(call.kwargs), grads=first(call.grads))
            for call in calls
        ]
        for calls in steps
    ]


def halved(steps: Sequence[list[CapturedCall]], torch: ModuleType) -> list[list[CapturedCall]]:
    """The first half of the samples of steps that `sliced` has cut."""
    sizes = (
        tensor.shape[0]
        for calls in steps
        for call in calls
        for tensor in tensors_in((call.args, call.kwargs, call.grads))
        if tensor.dim()
    )
    return first_samples(steps, next(sizes) // 2, torch)
