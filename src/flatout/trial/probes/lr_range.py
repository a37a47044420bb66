"""A probe that sets the learning rate and the optimizer of each step, and records the loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.trial.probes.probe import Probe, ProbeUnavailable

if TYPE_CHECKING:
    from torch.optim import Optimizer


class LrRangeProbe(Probe):
    """Gives the first parameter group ``low * factor**k`` in tick k; the others keep their proportion to it.

    ``low`` None: the script's own learning rate. The rate is set when each optimizer begins its step, so a
    scheduler of the script has no effect. The original values are restored at the end. ``optimizer`` (a name,
    with ``options``) steps instead of the script's.
    """

    def begin(self) -> None:
        self.low, self.factor = self.requested.get("low"), float(self.requested.get("factor", 1.0))
        self.groups = [
            group
            for optimizer in self.context.optimizers
            for group in optimizer.param_groups
            if "lr" in group
        ]
        if not self.groups:
            raise ProbeUnavailable(
                "this program updates its parameters without an optimizer that has a learning rate"
            )
        self.before = [float(group["lr"]) for group in self.groups]
        first = self.before[0] or 1.0
        self.share = [lr / first if first else 1.0 for lr in self.before]
        self.ledger.call("learning rates", self._put_back)
        self.losses: list[list[Any]] = [[]]
        self.rates: list[float] = []
        name = self.requested.get("optimizer")
        made = (
            [
                OptimizerStandIn(self.torch, optimizer, name, self.requested.get("options", {}))
                for optimizer in self.context.optimizers
            ]
            if name
            else []
        )
        self.stand_ins = {id(each.own): each for each in made}
        self.failed: Exception | None = None

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self.losses[-1].extend(loss.detach().double().mean() for loss in losses)

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        if self.low is not None:
            self._set(self._rate())
        if stand_in := self.stand_ins.get(id(optimizer)):
            self._try(stand_in.before)

    def optimizer_end(self, optimizer: Optimizer) -> None:
        if stand_in := self.stand_ins.get(id(optimizer)):
            self._try(stand_in.step)

    def _try(self, part: Callable[[], None]) -> None:
        """Run a part of the stand-in. Its error must not end the program; ``tick`` reports it."""
        try:
            if self.failed is None:
                part()
        except Exception as error:
            self.failed = error

    def tick(self) -> None:
        if self.failed is not None:
            raise self.failed
        self.rates.append(self._rate())
        self.losses.append([])

    def _rate(self) -> float:
        return (
            float(self.groups[0]["lr"])
            if self.low is None
            else float(self.low) * self.factor ** len(self.rates)
        )

    def _set(self, rate: float) -> None:
        for group, share in zip(self.groups, self.share, strict=True):
            _assign(group, rate * share)

    def _put_back(self) -> None:
        for group, lr in zip(self.groups, self.before, strict=True):
            _assign(group, lr)

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
            sum(map(float, recorded)) / len(recorded) if recorded else None
            for recorded in self.losses[: len(self.rates)]
        ]
        named = (
            next(iter(self.stand_ins.values())).optimizer if self.stand_ins else self.context.optimizers[0]
        )
        return {
            "lr": self.rates,
            "losses": [loss if loss is not None and math.isfinite(loss) else None for loss in losses],
            "groups": self.before,
            "optimizer": type(named).__name__,
        }


class OptimizerStandIn:
    """An optimizer that steps with the gradients of another one, which finds none and does nothing.

    It uses the other's groups with their learning rates and weight decay. Its steps trigger no events; they
    count as the other's.
    """

    def __init__(self, torch: ModuleType, own: Optimizer, name: str, options: dict[str, Any]) -> None:
        kind = _class_of(torch, name)
        knows = inspect.signature(kind).parameters
        shared = [key for key in ("lr", "weight_decay") if key in knows and key not in options]
        groups = [
            {"params": list(group["params"]), **{key: group[key] for key in shared if key in group}}
            for group in own.param_groups
        ]
        self.own, self.optimizer = own, kind(groups, **options)
        # Torch wraps step() with hooks when the first object is created
        self._silent_step = getattr(kind.step, "__wrapped__", kind.step)
        self._gradients: list[tuple[Any, Any]] = []

    def before(self) -> None:
        if getattr(self.own, "grad_scale", None) is not None:
            raise LookupError(
                f"{type(self.own).__name__} itself unscales the gradients of the GradScaler (fused=True), so no other optimizer can use them"
            )
        self._gradients = [
            (p, p.grad) for group in self.own.param_groups for p in group["params"] if p.grad is not None
        ]
        for parameter, _ in self._gradients:
            parameter.grad = None
        for mine, group in zip(self.optimizer.param_groups, self.own.param_groups, strict=False):
            mine["lr"] = float(group["lr"])

    def step(self) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients = []
        self._silent_step(self.optimizer)


def _class_of(torch: ModuleType, name: str) -> Any:
    module, _, last = name.rpartition(".")
    if module:
        return getattr(import_module(module), last)
    kinds = {
        each.lower(): value
        for each, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    }
    if name.lower() not in kinds or name.lower() == "optimizer":
        raise LookupError(
            f"torch.optim has no optimizer {name}; it has {', '.join(sorted(set(kinds) - {'optimizer'}))}"
        )
    return kinds[name.lower()]


def _assign(group: dict[str, Any], lr: float) -> None:
    if hasattr(group["lr"], "fill_"):
        group["lr"].fill_(lr)
    else:
        group["lr"] = lr
