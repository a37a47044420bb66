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

PLAIN_TYPES = (bool, int, float, str, type(None))
FindGenerators = Callable[[Any], "list[Any]"]


@dataclass
class BatchWithWorkerState:
    """A batch and its worker's state afterwards (None if unchanged).

    ``messages``: what could not be restored in this worker.
    """

    batch: Any
    worker_state: dict[str, Any] | None
    messages: list[str]

    def pin_memory(self, device: Device = None) -> BatchWithWorkerState:
        """Called by a DataLoader that pins memory."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return BatchWithWorkerState(pin_memory(self.batch, device), self.worker_state, self.messages)


def counters(thing: object) -> dict[str, Any]:
    """The plain values that an object holds: an epoch number or a position, for example."""
    return {
        name: value for name, value in getattr(thing, "__dict__", {}).items() if type(value) in PLAIN_TYPES
    }


def changed(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in now.items()
        if name not in before or (before[name] is not value and before[name] != value)
    }


class WorkerStateCollate:
    """Replaces the collate function of the workers, and with ``init_worker`` their worker_init_fn.

    ``worker_states``: the initial state of each worker, None for a new one. ``refetching``: the number of workers that
    first fetch a batch again. ``find`` returns the random generators that an object holds.
    """

    def __init__(
        self,
        collate_fn: Any,
        worker_init_fn: Callable[[int], Any] | None,
        find: FindGenerators | None,
        worker_states: list[dict[str, Any] | None],
        refetching: int,
    ) -> None:
        self.collate_fn, self.worker_init_fn, self.find = collate_fn, worker_init_fn, find
        self.worker_states, self.refetching = worker_states, refetching
        self._own_generators: list[Any] | None = None
        self._last_sent: dict[str, Any] | None = None
        self._counters: dict[str, Any] = {}
        self._messages: list[str] = []
        self._restores_later = False

    def init_worker(self, worker: int) -> None:
        """Runs in a worker before its first batch."""
        import torch

        if self.worker_init_fn is not None:
            self.worker_init_fn(worker)
        info = torch.utils.data.get_worker_info()
        self._counters = counters(info.dataset) if info is not None else {}
        self._restores_later = worker < self.refetching
        if not self._restores_later:
            self._restore(torch, info)

    def __call__(self, samples: Any) -> Any:
        batch = self.collate_fn(samples)
        import torch

        info = torch.utils.data.get_worker_info()
        if info is None:
            return batch
        if self._restores_later:
            self._restores_later = False
            self._restore(torch, info)
        worker_state = random_states(torch, self._generators(info), devices=False)
        if changed_counters := changed(self._counters, counters(info.dataset)):
            worker_state["counters"] = changed_counters
        update = worker_state if worker_state != self._last_sent else None
        self._last_sent = worker_state
        messages, self._messages = self._messages, []
        return BatchWithWorkerState(batch, update, messages)

    def _generators(self, info: Any) -> list[Any]:
        if self._own_generators is None:
            self._own_generators = self.find((info.dataset, self.collate_fn)) if self.find is not None else []
        return self._own_generators

    def _restore(self, torch: ModuleType, info: Any) -> None:
        worker_state = self.worker_states[info.id] if info.id < len(self.worker_states) else None
        if worker_state is not None:
            self._messages = set_random_states(
                torch, worker_state, self._generators(info) if worker_state.get("own") else ()
            )
            if "counters" in worker_state:
                vars(info.dataset).update(worker_state["counters"])
