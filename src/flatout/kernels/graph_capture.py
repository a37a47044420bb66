"""Capture one CUDA graph: a side stream per device, a memory pool, no garbage collection meanwhile."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import device as Device

_streams: dict[int, Any] = {}


class CaptureState:
    """Active while anything is being recorded.

    A module called inside another module's recording runs eagerly.
    """

    active = False


@contextmanager
def capture(graph: object, device: Device, pool: object) -> Iterator[None]:
    """Record the launches of the body on ``device`` into ``graph``.

    Raises the error of CUDA or torch if that fails. Other threads may use the device meanwhile
    ("thread_local"): loaders pin memory in a thread.
    """
    gc_enabled, CaptureState.active = gc.isenabled(), True
    gc.disable()  # a capture does not permit freeing a tensor or an event
    try:
        with torch.cuda.device(device):
            if device.index not in _streams:
                _streams[device.index] = torch.cuda.Stream(device)
            stream = _streams[device.index]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
            torch.cuda.current_stream(device).wait_stream(stream)
    finally:
        CaptureState.active = False
        if gc_enabled:
            gc.enable()


def unwrapped_grad() -> Any:
    """``torch.autograd.grad`` without wrappers: observers of the script's calls must not record ours."""
    return inspect.unwrap(torch.autograd.grad)


class StreamOrder:
    """Orders the launches of one graph if the script changes the current stream between them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._last_stream: Any = None

    def wait(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and current != self._last_stream:
            current.wait_stream(self._last_stream)
        self._last_stream = current
