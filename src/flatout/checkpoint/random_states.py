"""The random generators of a training: torch's, Python's and numpy's, and those held by its own objects.

A state consists of values that a checkpoint can hold, small and comparable: long rows of words are bytes.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.checkpoint.tensors import memory_of
from flatout.schema.errors import MALFORMED, CheckpointError

if TYPE_CHECKING:
    from torch import Generator, Tensor

KINDS = ("torch", "python", "numpy")


def random_states(torch: ModuleType, generators: Sequence[Any] = (), devices: bool = True) -> dict[str, Any]:
    """The present states of the random generators.

    They are those of torch, Python, numpy if imported, CUDA devices if in use, and the generators ``generators``.
    """
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

    Raises CheckpointError for invalid states.
    """
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

    Such draws can be repeated only together with everything in between.
    """

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
