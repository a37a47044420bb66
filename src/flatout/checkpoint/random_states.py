"""The random generators of a training: torch's, Python's and numpy's, and those held by its own objects.

A state consists of values that a checkpoint can hold, small and comparable: long rows of words are bytes.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.checkpoint.tensors import memory_of
from flatout.schema.errors import MALFORMED, CheckpointError

if TYPE_CHECKING:
    from torch import Generator, Tensor
    from torch import device as Device


KINDS = ("torch", "python", "numpy")


def random_states(torch: ModuleType, generators: Sequence[Any] = (), devices: bool = True) -> dict[str, Any]:
    """The present states of the random generators.

    They are those of torch, Python, numpy if imported, CUDA devices if in use, and the generators ``generators``."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {
        "torch": _bytes_of(torch.default_generator.get_state()),
        "python": _of_python(random.getstate()),
    }
    if devices and torch.cuda.is_initialized():
        states["cuda"] = [_bytes_of(state) for state in torch.cuda.get_rng_state_all()]
    if numpy is not None:
        states["numpy"] = _plain(numpy.random.get_state())
    if generators:
        states["own"] = [state_of(generator) for generator in generators]
    return states


def set_random_states(torch: ModuleType, states: dict[str, Any], generators: Sequence[Any] = ()) -> list[str]:
    """Restore states and return a sentence for each that could not be.

    Raises CheckpointError for invalid states."""
    try:
        return _set(torch, states, generators)
    except (*MALFORMED, RuntimeError) as error:
        raise CheckpointError(
            f"its random states cannot be restored ({type(error).__name__}: {str(error)[:200]})."
        ) from None


def _set(torch: ModuleType, states: dict[str, Any], generators: Sequence[Any]) -> list[str]:
    random.setstate(_to_python(states["python"]))
    torch.default_generator.set_state(_tensor_of(torch, states["torch"]))
    messages = []
    if "numpy" in states:
        import numpy

        numpy.random.set_state(_restored(states["numpy"]))
    devices = torch.cuda.device_count() if "cuda" in states and torch.cuda.is_available() else 0
    for number, state in enumerate(states.get("cuda", ())):
        if number < devices:
            torch.cuda.set_rng_state(_tensor_of(torch, state), number)
        else:
            messages.append(
                f"the random state of CUDA device {number} cannot be restored: there are {devices} devices now"
            )
    saved = states.get("own", ())
    if len(saved) != len(generators):
        messages.append(
            f"the data held {len(saved)} random generators when it was saved, and holds {len(generators)} now"
        )
        return messages
    for generator, state in zip(generators, saved, strict=True):
        if not set_state_of(torch, generator, state):
            messages.append(
                f"a {type(generator).__name__} of the data was another kind of generator when it was saved"
            )
    return messages


def setter_arguments(torch: ModuleType, states: dict[str, Any]) -> dict[str, Any]:
    """The states in the types that torch.set_rng_state, random.setstate and numpy expect."""
    converted: dict[str, Any] = {
        "torch": _tensor_of(torch, states["torch"]),
        "python": _to_python(states["python"]),
    }
    if "cuda" in states:
        converted["cuda"] = [_tensor_of(torch, state) for state in states["cuda"]]
    return converted | ({"numpy": _restored(states["numpy"])} if "numpy" in states else {})


def used_generators(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    """The generators that were used between two states."""
    pairs = zip(before.get("own", ()), after.get("own", ()), strict=False)
    return {kind for kind in KINDS if before.get(kind) != after.get(kind)} | {
        f"generator {number} of its own" for number, (a, b) in enumerate(pairs) if a != b
    }


class Interleaving:
    """Detects whether the draws at certain places are interleaved with other draws from the same generator.

    Such draws can be repeated only together with everything in between."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self._drawn_between: set[str] = set()
        self.kinds: set[str] = set()

    def begin(self) -> None:
        """Start of a range that can be repeated."""
        self._last, self._drawn_between = None, set()

    def observe(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Record one of those places."""
        if self._last is not None:
            self._drawn_between |= used_generators(self._last, before)
        self.kinds |= used_generators(before, after) & self._drawn_between
        self._last = after


def state_of(generator: Generator) -> Any:
    """The state of a torch.Generator, a random.Random, a numpy Generator or RandomState."""
    if isinstance(generator, random.Random):
        return {"python": _of_python(generator.getstate())}
    if hasattr(generator, "bit_generator"):
        return {"numpy": _plain(generator.bit_generator.state)}
    state = generator.get_state()
    return {"torch": _bytes_of(state)} if hasattr(state, "data_ptr") else {"numpy": _plain(state)}


def set_state_of(torch: ModuleType, generator: Generator, state: dict[str, Any]) -> bool:
    """Restore a state. False if it belongs to another kind of generator."""
    ((kind, metadata),) = state.items()
    try:
        if isinstance(generator, random.Random):
            generator.setstate(_to_python(state["python"]))
        elif hasattr(generator, "bit_generator"):
            generator.bit_generator.state = _restored(state["numpy"])
        else:
            generator.set_state(_tensor_of(torch, metadata) if kind == "torch" else _restored(metadata))
    except (KeyError, TypeError, ValueError, RuntimeError):
        return False
    return True


def _bytes_of(state: Tensor) -> bytes:
    return bytes(memory_of(state))


def _tensor_of(torch: ModuleType, state: bytes) -> Any:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _of_python(state: tuple[Any, ...]) -> list[Any]:
    return [state[0], array("I", state[1]).tobytes(), state[2]]


def _to_python(state: Sequence[Any]) -> tuple[Any, ...]:
    return (state[0], tuple(array("I", state[1])), state[2])


def _plain(value: Any) -> Any:
    """numpy's states without arrays, whose comparison is not a single bool."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if hasattr(value, "tobytes"):
        return {"words": value.tobytes(), "type": value.dtype.str} if value.shape else value.item()
    return value


def _restored(value: object) -> Any:
    if isinstance(value, dict) and "words" in value:
        import numpy

        return numpy.frombuffer(value["words"], value["type"]).copy()
    if isinstance(value, dict):
        return {key: _restored(part) for key, part in value.items()}
    return tuple(_restored(part) for part in value) if isinstance(value, list) else value


# Transfer the state of DataLoader workers to the training process with their batches, and into new workers.
#
# Each worker has its own random generators and a copy of the data set, with the generators and counters in it.
# `WorkerStateCollate` replaces the collate function and the worker_init_fn. After each batch it sends the parts of this
# state that have changed. A new worker receives the state before its first batch. If that batch was already
# consumed and is fetched again only to keep the workers in turn, it receives the state after it.

PLAIN_TYPES = (bool, int, float, str, type(None))
FindGenerators = Callable[[Any], "list[Any]"]


@dataclass
class BatchWithWorkerState:
    """A batch and its worker's state afterwards (None if unchanged).

    ``messages``: what could not be restored in this worker."""

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
    first fetch a batch again. ``find`` returns the random generators that an object holds."""

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
