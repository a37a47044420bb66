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
WITHOUT_BASE_INIT = ("SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")


class Schedulers:
    def __init__(self, torch: ModuleType, ledger: Ledger) -> None:
        self._created: dict[int, weakref.ref[Any]] = {}
        module = torch.optim.lr_scheduler
        for kind in (
            module.LRScheduler,
            *(getattr(module, name) for name in WITHOUT_BASE_INIT if hasattr(module, name)),
        ):
            if "__init__" in vars(kind):
                ledger.set(kind, "__init__", self._wrap_init(kind.__init__))

    @property
    def outermost(self) -> list[Any]:
        """Return living schedulers in creation order, without those that another one drives."""
        alive = [scheduler for ref in list(self._created.values()) if (scheduler := ref()) is not None]
        driven = {id(inner) for scheduler in alive for inner in getattr(scheduler, "_schedulers", ())}
        return [scheduler for scheduler in alive if id(scheduler) not in driven]

    def _wrap_init(self, init: Callable[..., Any]) -> Callable[..., Any]:
        created = self._created

        @wraps(init)
        def hooked_init(scheduler: LRScheduler, *args: object, **kwargs: object) -> None:
            init(scheduler, *args, **kwargs)
            key = id(scheduler)
            created[key] = weakref.ref(scheduler, lambda _: created.pop(key, None))

        return hooked_init
