"""Copies of device values that begin before the script reads the values.

A copy runs on a separate stream, behind the work queued before it, and has its own event. It is valid only
while its tensor is alive, in the same memory and unwritten. Torch's host allocator reuses pinned memory only
after the copy into it is complete. The device memory is recorded on the copying stream, so it is not reused
early either.

Source: CUDA semantics in torch's documentation, "Memory management" and ``Tensor.record_stream``.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event

MAX_COPIES = 64  # of unread values
MAX_SNAPSHOTS = 256  # reads of the allocator's segments, in total


class HostCopy:
    """One copy.

    ``host`` is valid after ``wait`` returns. ``stream`` is the handle of the computing stream.
    """

    __slots__ = ("_event", "host", "key", "original", "stream", "version")

    def __init__(self, key: tuple[str, Any], tensor: Tensor, host: Tensor, stream: int, event: Event) -> None:
        self.key, self.host, self.stream, self._event = key, host, stream, event
        self.original, self.version = weakref.ref(tensor), tensor._version

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()
            self._event = None


class HostCopies:
    """Copies by address. ``begin`` takes one-element CUDA values; ``valid_copy`` returns a tensor's valid copy."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self.by_address: dict[int, HostCopy] = {}
        self.segments = Segments(torch)
        self.streams: dict[int, Any] = {}  # handle -> a stream of the script
        self._copy_streams: dict[
            tuple[int, int], Any
        ] = {}  # device, thread -> the copying stream; an entered stream belongs to one thread

    def begin(self, values: Iterable[tuple[Any, Any]]) -> None:
        """Begin copies of ``values``, pairs of key and tensor.

        Leaves out values that another stream computed, that a graph's pool holds, or that a graph is
        recording.
        """
        by_device: dict[int, list[tuple[Any, Any]]] = {}
        for key, tensor in values:
            if self.valid_copy(tensor) is None:
                by_device.setdefault(tensor.device.index, []).append((key, tensor))
        for device, pairs in by_device.items():
            self._begin_on(device, pairs)

    def _begin_on(self, device: int, values: list[tuple[Any, Any]]) -> None:
        torch, stream = self.torch, self.current_stream(device)
        values = [
            (key, tensor) for key, tensor in values if self.segments.stream_of(tensor.data_ptr()) == stream
        ]
        if not values or self._is_capturing(device):
            return
        key_ = device, threading.get_ident()
        if key_ not in self._copy_streams:
            self._copy_streams[key_] = torch.cuda.Stream(device)
        copy_stream = self._copy_streams[key_]
        if stream not in self.streams:
            self.streams[stream] = torch.cuda.current_stream(device)
        with copy_stream:
            copy_stream.wait_stream(self.streams[stream])
            host_tensors = []
            for _, tensor in values:
                value = tensor.detach()
                host_tensors.append(
                    torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True).copy_(
                        value, non_blocking=True
                    )
                )
                value.record_stream(copy_stream)
            event = copy_stream.record_event()
        for (key, tensor), host in zip(values, host_tensors, strict=True):
            self.by_address.pop(tensor.data_ptr(), None)  # the newest comes last
            self.by_address[tensor.data_ptr()] = HostCopy(key, tensor, host, stream, event)
        while len(self.by_address) > MAX_COPIES:
            self.by_address.pop(next(iter(self.by_address)))

    def current_stream(self, device: int) -> int:
        """The handle of the device's current stream in this thread."""
        return int(self.torch._C._cuda_getCurrentRawStream(device))

    def _is_capturing(self, device: int) -> bool:
        cuda = self.torch.cuda
        with cuda.device(device):
            return bool(cuda.is_current_stream_capturing())

    def valid_copy(self, tensor: Tensor) -> HostCopy | None:
        """The valid copy of this tensor or of one that shares its memory; None if there is none."""
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a tensor without memory; the read itself reports it
            return None
        copy = self.by_address.get(address)
        if copy is None:
            return None
        original = copy.original()
        if original is None or original.data_ptr() != address or original._version != copy.version:
            del self.by_address[address]
            return None
        if tensor is original:
            return copy
        # A view shares the write count of its original; ``tensor.data`` has its own. If both are zero,
        # neither was written.
        is_written = copy.version or tensor.is_inference() or tensor._version
        return (
            None
            if is_written or tensor.dtype != original.dtype or tensor.numel() != 1 or tensor.is_neg()
            else copy
        )

    def drop_overwritten(self, memory: Iterable[Any]) -> None:
        """Drop the copies of these tensors: they are about to be written without a count."""
        for tensor in memory:
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            for address in [a for a in self.by_address if start <= a < start + storage.nbytes()]:
                del self.by_address[address]

    def clear(self) -> None:
        self.by_address.clear()


class Segments:
    """Maps a memory address to the stream for which the allocator reserved it.

    None for memory in the pool of a graph, which a replay writes without counting.
    """

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self._starts: list[int] = []
        self._segments: list[tuple[int, int, int | None]] = []  # start, end, stream
        self._snapshots = 0

    def stream_of(self, address: int) -> int | None:
        segment = self._find(address)
        if segment is None and self._snapshots < MAX_SNAPSHOTS:
            self._read_segments()
            segment = self._find(address)
        return segment[2] if segment is not None else None

    def clear(self) -> None:
        """Drop the map: memory may have returned to the device and be reserved for another stream."""
        self._starts, self._segments = [], []

    def _find(self, address: int) -> tuple[int, int, int | None] | None:
        index = bisect_right(self._starts, address) - 1
        return self._segments[index] if index >= 0 and address < self._segments[index][1] else None

    def _read_segments(self) -> None:
        self._snapshots += 1
        segments = [
            (
                segment["address"],
                segment["address"] + segment["total_size"],
                segment["stream"] if tuple(segment["segment_pool_id"]) == (0, 0) else None,
            )
            for segment in self.torch.cuda.memory_snapshot()
        ]
        self._segments = sorted(segments, key=lambda segment: segment[0])
        self._starts = [segment[0] for segment in self._segments]
