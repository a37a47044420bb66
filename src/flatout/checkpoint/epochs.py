"""Count the epochs of a script: how often it iterates over its training loader.

The training loader is the loader that fed the first step, even if the script creates it again for each epoch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.agent.loaders import around
from flatout.agent.training_context import TrainingContext

if TYPE_CHECKING:
    from torch.utils.data import DataLoader


class EpochCounter:
    """``count`` is 0 if the script iterated over no DataLoader before the first step ended."""

    def __init__(self, torch: ModuleType, ledger: Ledger) -> None:
        self._begun: Counter[Any] = Counter()
        self._last: Any = None
        self._trains: Any = None
        self._ways: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        around(torch, "epoch", self._observed, ledger)

    def first_step_ended(self) -> None:
        """Take the last iterated loader as the training loader."""
        self._trains = self._last

    @property
    def count(self) -> int:
        return self._begun[self._trains] if self._trains is not None else 0

    def _observed(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def hooked_iter(loader: DataLoader) -> Any:
            way = self._ways.get(loader)
            if way is None:
                way = self._ways[loader] = TrainingContext.loader_key(
                    loader.dataset,
                    {
                        "batch_size": loader.batch_size,
                        "num_workers": loader.num_workers,
                        "sampler": loader.sampler,
                        "drop_last": loader.drop_last,
                    },
                )
            self._begun[way] += 1
            self._last = way
            return begin(loader)

        return hooked_iter
