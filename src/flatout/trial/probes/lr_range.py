"""A probe that sets the learning rate of each step, and records the loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flatout.trial.probes.probe import Probe, ProbeUnavailable

if TYPE_CHECKING:
    from torch.optim import Optimizer


class LrRangeProbe(Probe):
    """Gives the first parameter group ``low * factor**k`` in tick k; the others keep their proportion to it.

    The rate is set when each optimizer begins its step, so a scheduler of the script has no effect. The
    original values are restored at the end.
    """

    def begin(self) -> None:
        self.low, self.factor = float(self.requested["low"]), float(self.requested["factor"])
        groups = (group for optimizer in self.context.optimizers for group in optimizer.param_groups)
        self.groups = [group for group in groups if "lr" in group]
        if not self.groups:
            raise ProbeUnavailable(
                "this program updates its parameters without an optimizer that has a learning rate"
            )
        self.before = [float(group["lr"]) for group in self.groups]
        self.ledger.call("learning rates", lambda: self._set(self.before))
        self.losses: list[list[Any]] = [[]]
        self.rates: list[float] = []

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self.losses[-1].extend(loss.detach().double().mean() for loss in losses)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        first = self.before[0]
        self._set([self._rate() * (lr / first if first else 1.0) for lr in self.before])

    def tick(self) -> None:
        self.rates.append(self._rate())
        self.losses.append([])

    def _rate(self) -> float:
        return self.low * self.factor ** len(self.rates)

    def _set(self, rates: list[float]) -> None:
        for group, lr in zip(self.groups, rates, strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def end(self) -> dict[str, Any]:
        super().end()
        return self._observed()

    def last_words(self) -> dict[str, Any]:
        """Report a failing program, for example one with a NaN loss, as diverged at this learning rate."""
        self.rates.append(self._rate())
        self.losses[len(self.rates) - 1] = []
        return self._observed()

    def _observed(self) -> dict[str, Any]:
        losses = [
            sum(map(float, step)) / len(step) if step else math.nan for step in self.losses[: len(self.rates)]
        ]
        return {
            "lr": self.rates,
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "groups": self.before,
            "optimizer": type(self.context.optimizers[0]).__name__,
        }
