"""One step of a `flatout.Loop`: its figures, without synchronising the device."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True, eq=False, repr=False)
class Step:
    """One optimizer step over one effective batch. `Loop` yields these.

        for step in loop:
            print(step.index, float(step.loss), step.lr)

    Attributes:
        index: Number of earlier steps in this loop, from 0.
        epoch: Number of the epoch, from 0.
        loss: Loss of the whole effective batch: a detached scalar tensor on the device. ``float(step.loss)``
            synchronises.
        lr: Learning rate of the first parameter group in this step.
        samples: Number of samples in this effective batch.
        parts: Number of micro-batches.
        grad_norm: Norm of the gradient before clipping, a scalar tensor. None without ``clip``.
        metrics: Further values of ``loss_fn``, combined over the micro-batches: scalar tensors by name.
        skipped: Why the optimizer did not step, as text. Empty if it did.
        ends_epoch: Whether this is the last step of its epoch. None if the loader has no length."""

    index: int
    epoch: int
    loss: Tensor
    lr: float
    samples: int
    parts: int
    grad_norm: Any
    metrics: dict[str, Any]
    skipped: str
    ends_epoch: bool | None
    _rate: Rate

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second over the last 32 steps, including the time between steps.

        None before the second step."""
        return self._rate.samples_per_s()

    def __repr__(self) -> str:
        skipped = f", skipped: {self.skipped}" if self.skipped else ""
        return f"Step({self.index}, epoch {self.epoch}, {self.samples} samples, lr {self.lr:g}{skipped})"


class Rate:
    """Samples per second over the last WINDOW steps."""

    WINDOW = 32

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque(maxlen=self.WINDOW)  # ends and samples

    def step(self, end_s: float, samples: int) -> None:
        self._steps.append((end_s, samples))

    def samples_per_s(self) -> float | None:
        (start_s, _), *later = self._steps or [(0.0, 0)]
        span = later[-1][0] - start_s if later else 0.0
        return sum(samples for _, samples in later) / span if span > 0 else None
