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
        self.original_rates = [float(group["lr"]) for group in self.groups]
        self.ledger.on_restore("learning rates", lambda: self._set_rates(self.original_rates))
        self.losses: list[list[Any]] = [[]]
        self.rates: list[float] = []

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self.losses[-1].extend(loss.detach().double().mean() for loss in losses)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        first = self.original_rates[0]
        self._set_rates([self._next_rate() * (lr / first if first else 1.0) for lr in self.original_rates])

    def tick(self) -> None:
        self.rates.append(self._next_rate())
        self.losses.append([])

    def _next_rate(self) -> float:
        return self.low * self.factor ** len(self.rates)

    def _set_rates(self, rates: list[float]) -> None:
        for group, lr in zip(self.groups, rates, strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr

    def end(self) -> dict[str, Any]:
        super().end()
        return self._results()

    def partial_result(self) -> dict[str, Any]:
        """Report a failing program, for example one with a NaN loss, as diverged at this learning rate."""
        self.rates.append(self._next_rate())
        self.losses[len(self.rates) - 1] = []
        return self._results()

    def _results(self) -> dict[str, Any]:
        losses = [
            sum(map(float, step)) / len(step) if step else math.nan for step in self.losses[: len(self.rates)]
        ]
        return {
            "lr": self.rates,
            "losses": [loss if math.isfinite(loss) else None for loss in losses],
            "groups": self.original_rates,
            "optimizer": type(self.context.optimizers[0]).__name__,
        }
