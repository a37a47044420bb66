"""The value of the lever `local_sgd`, and the outer step that synchronises the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

AVERAGE, NESTEROV = "average", "nesterov"
OUTER = {
    AVERAGE: (1.0, 0.0),
    NESTEROV: (0.7, 0.9),
}  # learning rate and momentum; NESTEROV: DiLoCo's (Douillard et al. 2023, section 3.2)


@dataclass(frozen=True)
class LocalSgdSettings:
    """``every``: steps per round.

    ``outer``: average the weights, or apply Nesterov momentum to the average progress.

    ``overlap``: send a round's progress while the next one trains, and apply it one round late. ``warmup``:
    steps that exchange gradients before the first round.
    """

    every: int = 8
    outer: str = AVERAGE
    overlap: bool = False
    warmup: int = 0


class Outer:
    """Updates the shared weights by the mean progress of the ranks.

        g = start - end, v = momentum v + g, weights -= rate (g + momentum v)

    This is torch.optim.SGD(nesterov=True) with g as the gradient. With rate 1 and momentum 0 the weights
    become the mean of the ranks' weights.
    """

    def __init__(self, torch: ModuleType, rate: float, momentum: float) -> None:
        self.torch, self.rate, self.momentum = torch, rate, momentum
        self._speed: list[Any] = []

    def step(self, weights: Sequence[Any], progress: Sequence[Any]) -> None:
        """Update in place. Pass the same weights each time."""
        if not self.momentum:
            self.torch._foreach_add_(list(weights), list(progress), alpha=-self.rate)
            return
        if not self._speed:
            self._speed = [self.torch.zeros_like(each) for each in weights]
        self.torch._foreach_mul_(self._speed, self.momentum)
        self.torch._foreach_add_(self._speed, list(progress))
        way = self.torch._foreach_add(list(progress), self._speed, alpha=self.momentum)
        self.torch._foreach_add_(list(weights), way, alpha=-self.rate)
