"""Tracks GradScalers: the loss before scaling, and cycles whose optimizer step was skipped."""

from __future__ import annotations

import weakref
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class Scalers:
    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self._scalers: dict[int, weakref.ref[Any]] = {}
        self._unscaled: dict[int, tuple[weakref.ref[Any], Any]] = {}

    @property
    def enabled(self) -> list[Any]:
        return [
            scaler for ref in self._scalers.values() if (scaler := ref()) is not None and scaler.is_enabled()
        ]

    def without_scale(self, loss: Tensor) -> Any:
        """Return the unscaled loss of a scaled one; other losses are returned unchanged."""
        entry = self._unscaled.get(id(loss))
        return entry[1] if entry is not None and entry[0]() is loss else loss

    def observe(self, ledger: Ledger, context: Any) -> None:
        scaler_class = self.torch.amp.GradScaler
        scale, step = scaler_class.scale, scaler_class.step

        @wraps(scale)
        def hooked_scale(scaler: object, outputs: object) -> Any:
            scaled = scale(scaler, outputs)
            self._scalers.setdefault(id(scaler), weakref.ref(scaler))
            if scaled is not outputs and isinstance(scaled, self.torch.Tensor):
                self._unscaled = {id(scaled): (weakref.ref(scaled), outputs)}
            return scaled

        @wraps(step)
        def hooked_step(scaler: Any, optimizer: Optimizer, *args: object, **kwargs: object) -> Any:
            events_before = context.optimizer_events
            result = step(scaler, optimizer, *args, **kwargs)
            # With infinite gradients the optimizer was not called, but the cycle has ended all the same.
            if scaler.is_enabled() and context.optimizer_events == events_before and not context.paused:
                context.optimizer_skipped(optimizer)
            return result

        ledger.set(scaler_class, "scale", hooked_scale)
        ledger.set(scaler_class, "step", hooked_step)
