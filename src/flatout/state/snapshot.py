"""A state as it is at one moment, on the host, while the training goes on: only this copy is waited for."""

from __future__ import annotations

from typing import Any

from flatout.state.values import Packed


class Snapshot:
    """Its memory is taken once and used again. ``take`` may be called when nobody reads the last copy any more."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self._kept: dict[str, Any] = {}
        self._copied: Any = None

    def take(self, packed: Packed) -> Packed:
        """The same with copies of its tensors. Those of a CUDA device arrive after `wait`; what is computed there later does not change them."""
        kept, devices = {}, set()
        for name, tensor in packed.tensors.items():
            copy = self._kept.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                # The device by name: a program may have set another default (torch.set_default_device).
                copy = self.torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
            kept[name] = copy.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        self._kept = kept
        self._copied = []
        for device in devices:
            event = self.torch.cuda.Event()
            event.record(self.torch.cuda.current_stream(device))
            self._copied.append(event)
        return Packed(packed.tree, kept, packed.left_out)

    def wait(self) -> None:
        """Until all of it has arrived; called from the thread that writes."""
        for event in self._copied or ():
            event.synchronize()
