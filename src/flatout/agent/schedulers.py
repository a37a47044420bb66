"""Finds learning rate schedulers as they are made: no other object leads to them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch.optim.lr_scheduler import LRScheduler

# torch 2.11 to 2.14: they do not call the initialiser of their base
MAKE_THEMSELVES = ("SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")


class Schedulers:
    def __init__(self, torch: ModuleType, ledger: Ledger) -> None:
        self._seen: dict[int, weakref.ref[Any]] = {}
        module = torch.optim.lr_scheduler
        for kind in (
            module.LRScheduler,
            *(getattr(module, name) for name in MAKE_THEMSELVES if hasattr(module, name)),
        ):
            if "__init__" in vars(kind):
                ledger.set(kind, "__init__", self._observed(kind.__init__))

    @property
    def outermost(self) -> list[Any]:
        """Return living schedulers in creation order, without those that another one drives."""
        alive = [scheduler for ref in list(self._seen.values()) if (scheduler := ref()) is not None]
        driven = {id(inner) for scheduler in alive for inner in getattr(scheduler, "_schedulers", ())}
        return [scheduler for scheduler in alive if id(scheduler) not in driven]

    def _observed(self, init: Callable[..., Any]) -> Callable[..., Any]:
        seen = self._seen

        @wraps(init)
        def hooked_init(scheduler: LRScheduler, *args: object, **kwargs: object) -> None:
            init(scheduler, *args, **kwargs)
            key = id(scheduler)
            seen[key] = weakref.ref(scheduler, lambda _: seen.pop(key, None))

        return hooked_init
