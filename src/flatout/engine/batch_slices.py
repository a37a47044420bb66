"""Fewer samples of captured steps, for a program whose step takes seconds: a replica does each step many times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flatout.engine.replay import mapped
from flatout.measure.parity import tensors_in

PLAYS = 17  # in steps: what judging takes where steps are long
LONGEST_PLAYS_S = 12.0  # from here on a part of the samples is played
FEWEST_SAMPLES = 16  # a batch normalisation needs some


def samples_played(size: int, step_ms: float) -> int:
    """Of a batch of ``size`` samples: all of them, or at most half where a whole step takes too long."""
    kept = max(FEWEST_SAMPLES, math.ceil(size * 1000 * LONGEST_PLAYS_S / (PLAYS * max(step_ms, 1.0))))
    return size if 2 * kept > size else kept


def sliced(steps: Sequence[list[dict[str, Any]]], step_ms: float, torch: Any) -> tuple[list[list[dict[str, Any]]], float]:
    """The same steps with the first of their samples, as many as the time of a step allows, and the share that was taken; 1.0 where they stay whole.

    Inputs and the gradients that came to the outputs must agree in one size of their first dimension: that of the batch. Scalars stay as they are.
    """
    tensors = [tensor for calls in steps for call in calls for tensor in tensors_in((call["args"], call["kwargs"], call["grads"]), torch)]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    size = next(iter(sizes), 0)
    kept = samples_played(size, step_ms)
    if len(sizes) != 1 or kept == size:
        return list(steps), 1.0

    def first(thing: Any) -> Any:
        return mapped(thing, lambda tensor: tensor[:kept] if tensor.dim() else tensor, torch)

    return [[{**call, **{name: first(call[name]) for name in ("args", "kwargs", "grads")}} for call in calls] for calls in steps], kept / size
