"""One step of a `flatout.Loop`: its figures, without synchronising the device."""

from __future__ import annotations

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
        self._ends: list[float] = [0.0] * self.WINDOW
        self._samples: list[int] = [0] * self.WINDOW
        self._count = 0

    def step(self, end_s: float, samples: int) -> None:
        i = self._count % self.WINDOW
        self._ends[i], self._samples[i] = end_s, samples
        self._count += 1

    def samples_per_s(self) -> float | None:
        count = min(self._count, self.WINDOW)
        if count < 2:
            return None
        first, last = (self._count - count) % self.WINDOW, (self._count - 1) % self.WINDOW
        span = self._ends[last] - self._ends[first]
        return (sum(self._samples[:count]) - self._samples[first]) / span if span > 0 else None
