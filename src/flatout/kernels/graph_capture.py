"""One capture: a side stream for each device, a memory pool, no garbage collection in between."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_streams: dict[int, Any] = {}


class Recording:
    """Set while anything is recorded: a module that is called inside the recording of another one runs as it is."""

    active = False


@contextmanager
def capture(graph: Any, device: Any, pool: Any) -> Iterator[None]:
    """Record what the body launches on ``device`` into ``graph``. Raises what CUDA or torch says where that cannot be recorded.

    Other threads may use the device meanwhile ("thread_local"): loaders pin memory in one.
    """
    collects, Recording.active = gc.isenabled(), True
    gc.disable()  # it could free a tensor or an event, which a capture does not permit
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
        Recording.active = False
        if collects:
            gc.enable()


def plain_grad() -> Any:
    """``torch.autograd.grad`` itself: whoever observes the script's calls must not take ours for one."""
    return inspect.unwrap(torch.autograd.grad)


class InOrder:
    """Makes launches of one graph follow each other where the script changes the current stream between them."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.last: Any = None

    def wait(self) -> None:
        now = torch.cuda.current_stream(self.device)
        if self.last is not None and now != self.last:
            now.wait_stream(self.last)
        self.last = now
