"""Finds sample orders and selected rows that no variable holds.

An example is `for rows in data[torch.randperm(n)].split(16)`: only the running loop holds the rows.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._device import _device_constructors

from flatout.agent.frames import is_users
from flatout.agent.ledger import Ledger
from flatout.checkpoint.resume.value_log import ValueLog

if TYPE_CHECKING:
    from torch import Tensor

DRAWN = "drawn "  # prefix of their names

# torch caches the set of its functions that make tensors at the first call. The set must hold torch's own
# functions, so fill it before any of them is wrapped. Otherwise `torch.set_default_device` ignores what a
# wrapper calls.
_device_constructors()


class SampleOrders:
    """Holds orders and rows that the script's own code has drawn or selected, as long as they are alive.

    Each is identified by the hash of the control flow and the place in the code, which are the same in both
    runs.
    """

    def __init__(self, value_log: ValueLog, ledger: Ledger) -> None:
        self.value_log, self.ledger = value_log, ledger
        self._way = self._count = 0
        self._living: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def install(self) -> None:
        self.ledger.set(torch, "randperm", self._observed(torch.randperm))

    def held(self) -> dict[str, Any]:
        return {f"{DRAWN}{name}": rows for name, rows in sorted(self._living.items())}

    def taken(self, rows: Tensor, caller: FrameType) -> None:
        """Register selected rows. ``rows``: None for rows without values during a replay."""
        if self.value_log.observes and is_users(caller.f_code.co_filename):
            self._count = self._count + 1 if self.value_log.flow == self._way else 0
            self._way = self.value_log.flow
            if rows is not None:
                self._living[f"{self._way & (1 << 64) - 1:x} {caller.f_lasti} {self._count}"] = rows

    def _observed(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def randperm(*args: object, **kwargs: object) -> Any:
            order = really(*args, **kwargs)
            self.taken(order, sys._getframe(1))
            return order

        return randperm
