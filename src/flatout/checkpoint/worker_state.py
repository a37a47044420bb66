"""Transfer the state of DataLoader workers to the training process with their batches, and into new workers.

Each worker has its own random generators and a copy of the data set, with the generators and counters in it.
`WorkerStateCollate` replaces the collate function and the worker_init_fn. After each batch it sends the parts of this
state that have changed. A new worker receives the state before its first batch. If that batch was already
consumed and is fetched again only to keep the workers in turn, it receives the state after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.checkpoint.random_states import random_states, set_random_states

if TYPE_CHECKING:
    from torch import device as Device

PLAIN = (bool, int, float, str, type(None))
Find = Callable[[Any], "list[Any]"]


@dataclass
class BatchWithWorkerState:
    """A batch and its worker's state afterwards (None if unchanged).

    ``said``: what could not be restored in this worker.
    """

    batch: Any
    worker_state: dict[str, Any] | None
    said: list[str]

    def pin_memory(self, device: Device = None) -> BatchWithWorkerState:
        """Called by a DataLoader that pins memory."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return BatchWithWorkerState(pin_memory(self.batch, device), self.worker_state, self.said)


def counters(thing: object) -> dict[str, Any]:
    """The plain values that an object holds: an epoch number or a position, for example."""
    return {name: value for name, value in getattr(thing, "__dict__", {}).items() if type(value) in PLAIN}


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in now.items()
        if name not in before or (before[name] is not value and before[name] != value)
    }


class WorkerStateCollate:
    """Replaces the collate function of the workers, and with ``begins`` their worker_init_fn.

    ``worker_states``: the initial state of each worker, None for a new one. ``again``: the number of workers that
    first fetch a batch again. ``find`` returns the random generators that an object holds.
    """

    def __init__(
        self,
        collate_fn: Any,
        worker_init_fn: Callable[[int], Any] | None,
        find: Find | None,
        worker_states: list[dict[str, Any] | None],
        again: int,
    ) -> None:
        self.collate_fn, self.worker_init_fn, self.find = collate_fn, worker_init_fn, find
        self.worker_states, self.again = worker_states, again
        self._own: list[Any] | None = None
        self._sent: dict[str, Any] | None = None
        self._counters: dict[str, Any] = {}
        self._said: list[str] = []
        self._waiting = False

    def begins(self, worker: int) -> None:
        """Runs in a worker before its first batch."""
        import torch

        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
        info = torch.utils.data.get_worker_info()
        self._counters = counters(info.dataset) if info is not None else {}
        self._waiting = worker < self.again
        if not self._waiting:
            self._go_on(torch, info)

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        import torch

        info = torch.utils.data.get_worker_info()
        if info is None:
            return batch
        if self._waiting:
            self._waiting = False
            self._go_on(torch, info)
        worker_state = random_states(torch, self._generators(info), devices=False)
        if counted := changed(self._counters, counters(info.dataset)):
            worker_state["counters"] = counted
        news = worker_state if worker_state != self._sent else None
        self._sent = worker_state
        said, self._said = self._said, []
        return BatchWithWorkerState(batch, news, said)

    def _generators(self, info: Any) -> list[Any]:
        if self._own is None:
            self._own = self.find((info.dataset, self.collate_fn)) if self.find is not None else []
        return self._own

    def _go_on(self, torch: ModuleType, info: Any) -> None:
        worker_state = self.worker_states[info.id] if info.id < len(self.worker_states) else None
        if worker_state is not None:
            self._said = set_random_states(
                torch, worker_state, self._generators(info) if worker_state.get("own") else ()
            )
            if "counters" in worker_state:
                vars(info.dataset).update(worker_state["counters"])
