"""The clocks. Nowhere else does flatout read the time of a step.

Two kinds behind one interface: ``mark()`` notes a moment and ``elapsed_ms(a, b)`` is the time between two. On CUDA a
mark is an event on the current stream, so that marking never waits for the device; reading the difference does.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    name: str

    def mark(self) -> Any: ...

    def elapsed_ms(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None:
        """Wait until everything marked so far has happened."""


class HostClock:
    """Nanoseconds of the host's monotonic clock."""

    name = "host"
    mark = staticmethod(time.perf_counter_ns)

    def elapsed_ms(self, start: int, end: int) -> float:
        return (end - start) / 1e6

    def settle(self) -> None:
        pass


class CudaClock:
    """CUDA events; they resolve about 0.5 microseconds (CUDA runtime documentation, cudaEventElapsedTime)."""

    name = "cuda"

    def __init__(self, torch: Any) -> None:
        self._cuda = torch.cuda

    def mark(self) -> Any:
        event = self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_ms(self, start: Any, end: Any) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))

    def settle(self) -> None:
        self._cuda.synchronize()


def clock_for(torch: Any, device_type: str) -> Clock:
    return CudaClock(torch) if device_type == "cuda" else HostClock()


def seconds() -> float:
    """Seconds of the host's monotonic clock, for budgets and deadlines."""
    return time.monotonic()


def cpu_seconds() -> float:
    """Processor seconds of this process, all threads."""
    return time.process_time()


def thread_seconds() -> float:
    """Processor seconds of the thread that asks."""
    return time.thread_time()


def sleep(for_s: float) -> None:
    time.sleep(for_s)


def today() -> str:
    """The moment in UTC, ISO 8601, to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
