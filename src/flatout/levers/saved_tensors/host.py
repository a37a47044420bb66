"""Keep saved tensors in host memory until the backward pass needs them."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.levers.saved_tensors.rederive import KeptTensor

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.cuda import Stream

LEAST_BYTES = 2**20  # below this size, starting a copy takes as long as the copy
MOST_KNOWN = 4096  # tensors in the lookup table


class HostTensor:
    """A copy of a tensor in pinned host memory, and the event that marks its completion."""

    __slots__ = ("__weakref__", "copy", "device", "event", "stride")

    def __init__(self, torch: ModuleType, tensor: Tensor, stream: Stream | None) -> None:
        self.device, self.stride, self.event = tensor.device, tensor.stride(), None
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        self.copy = (
            torch.empty_strided(
                tensor.shape, self.stride, dtype=tensor.dtype, device="cpu", pin_memory=stream is not None
            )
            if whole
            else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=stream is not None)
        )
        if stream is None:
            self.copy.copy_(tensor)
            return
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self.copy.copy_(tensor, non_blocking=True)
            self.event = stream.record_event()
        tensor.record_stream(stream)  # its memory is not reused before the copy ends

    def back(self, torch: ModuleType) -> Any:
        """The tensor on its device again. The device stream waits for the copy; the host does not."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)
        return self.copy.to(self.device, non_blocking=True)


class OffloadHooks:
    """Saved-tensor hooks that move tensors of ``device_type`` with at least ``least_bytes`` to the host.

    Parameters and small tensors stay. A tensor that several operations save (three projections of one input)
    is copied once. Copies from a CUDA device run on a side stream; copies from a CPU, which has none, run at
    once.
    """

    def __init__(self, torch: ModuleType, device_type: str, least_bytes: int = LEAST_BYTES) -> None:
        self.torch, self.device_type, self.least_bytes = torch, device_type, least_bytes
        self._streams: dict[Any, Any] = {}  # by device
        self.moved_bytes = 0
        self._known: dict[
            Any, tuple[Any, int, Any]
        ] = {}  # place in a storage -> storage, version, copy; weak

    def pack(self, tensor: Tensor) -> Any:
        size = tensor.numel() * tensor.element_size()
        parameter = (tensor._base if tensor._base is not None else tensor).is_leaf and tensor.requires_grad
        if (
            tensor.device.type != self.device_type
            or size < self.least_bytes
            or parameter
            or tensor.layout != self.torch.strided
        ):
            return KeptTensor(tensor)
        from torch.multiprocessing.reductions import StorageWeakRef

        storage = StorageWeakRef(tensor.untyped_storage())
        place = (storage.cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in self._known:
            known, version, found = self._known[place]
            away = found()
            if away is not None and version == tensor._version and not known.expired():
                return away
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        away = HostTensor(self.torch, tensor.detach(), self._stream(tensor.device))
        self._known[place] = storage, tensor._version, weakref.ref(away)
        self.moved_bytes += size
        return away

    def _stream(self, device: Device) -> Any:
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = self.torch.cuda.Stream(device)
        return self._streams.get(device)

    def unpack(self, packed: Any) -> Any:
        return packed.back(self.torch) if isinstance(packed, HostTensor) else packed.value()
