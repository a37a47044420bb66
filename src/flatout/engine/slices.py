"""Fewer samples of captured steps, for a program whose step takes seconds: a replica does each step many times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flatout.engine.replay import mapped
from flatout.measure.parity import tensors_in

FEWEST_SAMPLES = 8  # a batch normalisation needs some


def sliced(steps: Sequence[list[dict[str, Any]]], share: float, torch: Any) -> tuple[list[list[dict[str, Any]]], float]:
    """The same steps with the first ``share`` of their samples, and the share that was taken; 1.0 where they stay whole.

    Inputs and the gradients that came to the outputs must agree in one size of their first dimension: that of the batch. Scalars stay as they are.
    """
    tensors = [tensor for calls in steps for call in calls for tensor in tensors_in((call["args"], call["kwargs"], call["grads"]), torch)]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
    size = next(iter(sizes), 0)
    kept = max(FEWEST_SAMPLES, math.ceil(share * size))
    if len(sizes) != 1 or 2 * kept > size:
        return list(steps), 1.0

    def first(thing: Any) -> Any:
        return mapped(thing, lambda tensor: tensor[:kept] if tensor.dim() else tensor, torch)

    return [[{**call, **{name: first(call[name]) for name in ("args", "kwargs", "grads")}} for call in calls] for calls in steps], kept / size
