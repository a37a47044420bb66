"""What a step needs to run again after an out-of-memory error: free memory, its random state, micro-batches that fit."""

from __future__ import annotations

import gc
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.batches import even_sizes

if TYPE_CHECKING:
    from torch import device as Device

SMALLER = (
    'One sample does not fit. Use a smaller model or input, precision="bf16" (about half the activation memory), or recompute '
    "activations (torch.utils.checkpoint; about a third more time)."
)
MAX_MEMORY_SHARE = 0.95  # of the device's memory; a higher peak leaves nothing for fragmentation
# Messages of allocators that raise a plain RuntimeError.
MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)


def is_out_of_memory(torch: ModuleType, error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in MESSAGES)


def free_memory(torch: ModuleType, device: Device) -> None:
    """Free what only the failed step held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class OutOfMemory:
    """A summary of the exception, without frames or tensors. ``size`` is the micro-batch that did not fit."""

    message: str
    size: int

    @classmethod
    def from_error(cls, error: BaseException, size: int) -> OutOfMemory:
        """Clear the frames of the exception and of its causes: their variables hold the step's tensors."""
        message = (str(error).strip().splitlines() or ["no message"])[0][:300]
        current: BaseException | None = error
        visited: set[int] = set()
        while current is not None and id(current) not in visited:
            visited.add(id(current))
            traceback.clear_frames(current.__traceback__)
            current = current.__cause__ or current.__context__
        return cls(message, size)


class MicroBatches:
    """The current micro-batch size. It starts as requested and shrinks after an out-of-memory error."""

    def __init__(self, requested: int | None) -> None:
        self.requested = requested
        self.limit = requested
        self.failed: list[int] = []

    def sizes(self, size: int) -> list[int]:
        return even_sizes(size, self.limit)

    def largest(self, window: list[tuple[Any, int]]) -> int:
        return max(self.sizes(size)[0] for _, size in window)

    def shrink(self, failed: int) -> None:
        """``failed`` samples did not fit: use half of them from now on."""
        self.failed.append(failed)
        self.limit = -(-failed // 2)

    def set_size(self, size: int) -> None:
        """Use this size as the requested one from now on."""
        self.requested = self.limit = size

    def state(self) -> dict[str, Any]:
        """The sizes found, for a checkpoint."""
        return {"requested": self.requested, "limit": self.limit, "failed": list(self.failed)}

    def load_state(self, state: dict[str, Any]) -> None:
        self.requested, self.limit, self.failed = state["requested"], state["limit"], list(state["failed"])


class MemoryHeadroom:
    """Whether the last step left free memory on the device.

    That means no allocator retry (which frees its cache) and a peak below ROOM."""

    def __init__(self, torch: ModuleType, device: Device) -> None:
        self.torch, self.device, self.cuda = torch, device, device.type == "cuda"
        if self.cuda:
            self.total = torch.cuda.get_device_properties(device).total_memory
            self._retries = self._retry_count()
            torch.cuda.reset_peak_memory_stats(device)

    def _retry_count(self) -> int:
        return int(self.torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def is_enough(self) -> bool:
        """Call after a step; it resets the counters for the next one.

        Always True on a CPU, where nothing is known."""
        if not self.cuda:
            return True
        before, self._retries = self._retries, self._retry_count()
        peak = self.torch.cuda.max_memory_reserved(self.device)
        self.torch.cuda.reset_peak_memory_stats(self.device)
        return self._retries == before and peak <= MAX_MEMORY_SHARE * self.total


class RandomState:
    """A snapshot of the random generators; ``restore`` puts it back.

    torch's state costs 2 us, those of ``random`` and numpy 20 to 100 us; ``others=False`` skips these.
    ``device`` is the model's."""

    __slots__ = ("_device", "_device_state", "_numpy", "_python", "_torch", "_torch_state")

    def __init__(self, torch: ModuleType, device: Device = None, others: bool = True) -> None:
        self._torch, self._device = torch, device
        self._torch_state = torch.default_generator.get_state()
        self._device_state = (
            torch.cuda.get_rng_state(device) if device is not None and device.type == "cuda" else None
        )
        self._python: Any = random.getstate() if others else None
        self._numpy: Any = _numpy_state() if others else None

    def restore(self) -> None:
        self._torch.default_generator.set_state(self._torch_state)
        if self._device_state is not None:
            self._torch.cuda.set_rng_state(self._device_state, self._device)
        if self._python is not None:
            random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)

    def has_changed(self) -> bool:
        """Whether torch's generators have been used since."""
        equal = self._torch.equal
        if not equal(self._torch_state, self._torch.default_generator.get_state()):
            return True
        before = self._device_state
        return before is not None and not equal(before, self._torch.cuda.get_rng_state(self._device))

    def others_changed(self) -> bool:
        """Whether ``random`` or numpy have been used since."""
        if self._python != random.getstate():
            return True
        before, now = self._numpy, _numpy_state()
        if before is None or now is None:
            return False
        return now[2:] != before[2:] or bool((now[1] != before[1]).any())


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return numpy.random.get_state() if numpy is not None else None


@contextmanager
def preserve_random_state(torch: ModuleType, device: Device = None) -> Iterator[None]:
    """Restore the random state afterwards, whatever the block draws."""
    state = RandomState(torch, device)
    try:
        yield
    finally:
        state.restore()
