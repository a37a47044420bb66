"""The clocks. All step times of flatout are read here.

Two kinds share one interface: ``mark()`` records a moment, and ``elapsed_ms(a, b)`` is the time between two.
On CUDA a mark is an event on the current stream: marking never waits for the device, but reading the
difference does.
"""

from __future__ import annotations

import time
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import device as Device


class Clock(Protocol):
    name: str

    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float: ...

    def wait_for(self, mark: Any) -> None:
        """Wait until this mark has happened."""

    def synchronize(self) -> None:
        """Wait until all marks so far have happened."""


class HostClock:
    """Monotonic clock of the host, in nanoseconds."""

    name = "host"
    mark = staticmethod(time.perf_counter_ns)

    def elapsed_ms(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def wait_for(self, mark: int) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaClock:
    """CUDA events. They resolve about 0.5 microseconds (CUDA runtime documentation, cudaEventElapsedTime).

    ``device`` is the device of the model; None is the current one. The clock saves torch's waiting functions
    when it is created, because a profile counts or replaces the program's own calls of them.
    """

    name = "cuda"

    def __init__(self, torch: ModuleType, device: Device = None) -> None:
        self._cuda, self._device = torch.cuda, device
        self._wait, self._wait_for = torch.cuda.synchronize, torch.cuda.Event.synchronize

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        self.wait_for(end)
        return float(start.elapsed_time(end))

    def wait_for(self, mark: Any) -> None:
        self._wait_for(mark)

    def synchronize(self) -> None:
        self._wait(self._device)


def clock_for(torch: ModuleType, device: Device) -> Clock:
    """The clock for ``device``: a torch.device, or its type as a string."""
    device_type, cuda_device = (device, None) if isinstance(device, str) else (device.type, device)
    return CudaClock(torch, cuda_device) if device_type == "cuda" else HostClock()


def seconds() -> float:
    """The seconds of the host's monotonic clock, for budgets and deadlines."""
    return time.monotonic()


def cpu_seconds() -> float:
    """The CPU seconds of this process, all threads."""
    return time.process_time()


def thread_seconds() -> float:
    """The CPU seconds of the calling thread."""
    return time.thread_time()


def sleep(for_s: float) -> None:
    time.sleep(for_s)


def utc_now() -> str:
    """The current time in UTC, ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
