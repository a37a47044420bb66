"""The base of the memory probes: records the allocations of some ticks."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

from flatout.measure.clock import HostClock
from flatout.measure.nests import tensors_in
from flatout.trial.probes.probe import Probe

if TYPE_CHECKING:
    from torch import Tensor

START_MARK = "flatout: the recording begins"
CUDA_BLOCK_BYTES = 512  # kMinBlockSize of torch's CUDACachingAllocator


class AllocationRecorder(Probe):
    """A probe that records the allocations of its ticks with torch's profiler.

    ``record`` runs after a tick, never in ``begin``. A tick ends inside an operator (``Optimizer.step`` is
    one). An operator that began under one recording writes its end into that recording even after it is
    freed, if another one runs by then (torch 2.14).
    """

    def begin(self) -> None:
        self.clock = HostClock()
        self.tick_ends: list[int] = []

    def record(self) -> None:
        self.profile = self.torch.profiler.profile(activities=self.tools.activities(), profile_memory=True)
        self.profile.start()
        self.ledger.on_restore("profiler", self.profile.stop)
        self.start_mark = self.clock.mark()
        with self.torch.profiler.record_function(START_MARK):
            pass

    def tick(self) -> None:
        self.tick_ends.append(self.clock.mark())

    def events(self) -> list[Any]:
        return list(self.profile.profiler.kineto_results.events())

    def clock_offset_ns(self, events: list[Any]) -> int:
        """The recording's clock minus ours."""
        return next((event.start_ns() - self.start_mark for event in events if event.name() == START_MARK), 0)

    def live_tensors(self) -> dict[str, list[Any]]:
        """The tensors that are expected to stay alive."""
        parameters = {id(p): p for root in self.context.roots for p in root.parameters()} | {
            id(p): p for p in self.context.parameters
        }
        return {
            "parameters": list(parameters.values()),
            "gradients": [p.grad for p in parameters.values() if p.grad is not None],
            "buffers": [b for root in self.context.roots for b in root.buffers()],
            "optimizer state": [
                v for o in self.context.optimizers for state in o.state.values() for v in tensors_in(state)
            ],
        }

    def in_use(self) -> int:
        """The bytes of all tensors known to Python, frozen ones too; on CUDA, of the allocator."""
        if self.context.device_type == "cuda":
            return int(self.torch.cuda.memory_allocated(self.context.device))
        tensor_class = self.torch.Tensor
        storages = {}
        frozen = gc.get_freeze_count()  # frozen objects (lever gc_pause) are in no list
        if frozen:
            gc.unfreeze()
        objects = gc.get_objects()
        if frozen:
            gc.freeze()
        for obj in objects:
            if (
                issubclass(type(obj), tensor_class)
                and obj.device.type == self.context.device_type
                and obj.layout == self.torch.strided
            ):
                storage = obj.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())


def block_bytes(tensors: list[Any]) -> int:
    """The bytes of CUDA allocator blocks of some tensors; the four bytes of a loss take a block."""
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "cuda"
    }
    return sum(-(-size // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES for size in sizes.values())


def storage_bytes(tensors: list[Tensor], device_type: str) -> int:
    """The bytes of the storages of some tensors, each counted once."""
    sizes = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type == device_type and str(tensor.layout) == "torch.strided":
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
