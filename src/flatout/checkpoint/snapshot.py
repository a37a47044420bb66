"""Copy a state to the host at one moment, while the training continues; only this copy is waited for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from flatout.checkpoint.values import Packed


class Snapshot:
    """Its memory is allocated once and reused. Call ``take`` only after the last copy has been read."""

    def __init__(self, torch: ModuleType) -> None:
        self.torch = torch
        self._buffers: dict[str, Any] = {}
        self._copy_events: Any = None

    def take(self, packed: Packed) -> Packed:
        """The same state with copies of its tensors. Copies from a CUDA device arrive after `wait`.

        Later computation on the device does not change them.
        """
        buffers, devices = {}, set()
        for name, tensor in packed.tensors.items():
            copy = self._buffers.get(name)
            if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
                # Name the device: a program may have set another default (torch.set_default_device).
                copy = self.torch.empty(
                    tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda
                )
            buffers[name] = copy.copy_(tensor, non_blocking=True)
            if tensor.is_cuda:
                devices.add(tensor.device)
        self._buffers = buffers
        self._copy_events = []
        for device in devices:
            event = self.torch.cuda.Event()
            event.record(self.torch.cuda.current_stream(device))
            self._copy_events.append(event)
        return Packed(packed.tree, buffers, packed.left_out)

    def wait(self) -> None:
        """Wait until all copies have arrived; called from the writing thread."""
        for event in self._copy_events or ():
            event.synchronize()
