"""Probes for memory: what fills it in a step, whether it grows from step to step, and what holds it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import place_of
from flatout.agent.ledger import Ledger
from flatout.agent.lines import OperatorLines
from flatout.measure.memory import (
    MemoryMoment,
    allocations,
    bytes_at,
    reserved_for_graphs,
    running_totals,
    step_memory,
)
from flatout.measure.nests import tensors_in
from flatout.trial.probes.allocations import AllocationRecorder, storage_bytes
from flatout.trial.probes.leak import SETTLING_TICKS

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


class _SavedTensor:
    """Stands for a tensor that autograd keeps for the backward pass, for as long as autograd keeps it."""

    __slots__ = ("on_release", "tensor")

    def __init__(self, tensor: Tensor, on_release: Any) -> None:
        self.tensor, self.on_release = tensor, on_release

    def __del__(self) -> None:
        if self.on_release is not None:
            self.on_release()


class MemoryProbe(AllocationRecorder):
    """Records what fills the memory in the last of its ticks. It ignores the first one."""

    def begin(self) -> None:
        super().begin()
        self.names = {
            id(m): name or type(root).__name__
            for root in self.context.roots
            for name, m in self.context.unwrap_ddp(root).named_modules()
        }
        self.module_stack: list[str] = []
        self.activations = 0
        self.by_module: Counter[str] = Counter()
        self.modules: dict[str, int] | None = None  # a copy of by_module while it is current
        self.fixed: dict[str, int] = {}  # kind -> bytes, constant within a tick
        self.start_bytes: list[int] = []  # bytes in use as each tick begins
        self.saved: dict[int, list[int]] = {}  # address of a storage -> times saved, bytes
        self.first_saver: dict[int, str] = {}  # address of a storage -> the module that saved it first
        self.inputs: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.moments: list[MemoryMoment] = []
        self.line_ledger = Ledger()
        self.lines = OperatorLines(self.torch, self.line_ledger, self.clock.mark)
        self.recording = False

    def record(self) -> None:
        super().record()
        self.recording = True
        modules = self.torch.nn.modules.module
        if not self.context.compiled_by_script:  # global hooks would cause a recompilation
            begin = modules.register_module_forward_pre_hook(self._module_begin)
            end = modules.register_module_forward_hook(self._module_end, always_call=True)
            self.ledger.on_restore("forward pre-hook", begin.remove)
            self.ledger.on_restore("forward hook", end.remove)
        for parameter in self.context.parameters:
            if parameter.is_leaf:
                hook = parameter.register_post_accumulate_grad_hook(self._on_gradient)
                self.ledger.on_restore("gradient hook", hook.remove)
        hooks = self.torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        hooks.__enter__()
        self.ledger.on_restore("saved_tensors_hooks", partial(hooks.__exit__, None, None, None))
        self._count_live()

    def _count_live(self) -> None:
        live_tensors = self.live_tensors()
        self.fixed = {
            kind: storage_bytes(live_tensors[kind], self.context.device_type)
            for kind in ("parameters", "buffers", "optimizer state")
        }
        self.fixed_pointers = {
            t.untyped_storage().data_ptr()
            for kind in live_tensors
            for t in live_tensors[kind]
            if t.layout == self.torch.strided
        }
        self.gradients = {
            id(p): storage_bytes([p.grad], self.context.device_type)
            for p in live_tensors["parameters"]
            if p.grad is not None
        }
        self.start_bytes.append(self.in_use())
        self._sample()

    def tick(self) -> None:
        if not self.recording:
            self.record()
            return
        super().tick()
        self.line_ledger.restore()  # tensors must not be inspected under a dispatch mode
        self._count_live()
        if len(self.tick_ends) == self.ticks - 2 and not self.context.compiled_by_script:
            self.lines.install()

    # -- events of a step

    def data_end(self, loader: DataLoader, batch: object) -> None:
        self._count_inputs(batch)

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gradients = {
            id(p): storage_bytes([p.grad], self.context.device_type)
            for p in self.context.parameters
            if p.grad is not None
        }
        self._count_inputs((args, kwargs))
        self._sample()

    def _count_inputs(self, batch: object) -> None:
        tensors = [
            t
            for t in tensors_in(batch)
            if t.device.type == self.context.device_type and t.layout == self.torch.strided
        ]
        self.inputs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        self._sample()

    def optimizer_end(self, optimizer: Optimizer) -> None:
        self._sample()

    def _module_begin(self, module: Module, args: object) -> None:
        self.module_stack.append(self.names.get(id(module), type(module).__name__))

    def _module_end(self, module: Module, args: object, output: object) -> None:
        if self.module_stack:
            self.module_stack.pop()
        self._sample()

    def _on_gradient(self, parameter: Parameter) -> None:
        if parameter.grad is not None:
            self.gradients[id(parameter)] = storage_bytes([parameter.grad], self.context.device_type)
        self._sample()

    def _pack(self, tensor: Tensor) -> Any:
        try:
            storage = tensor.untyped_storage()
            pointer, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without memory, for example one being traced
            return _SavedTensor(tensor, None)
        detached = tensor.detach()  # an output that references itself is never freed
        known = pointer in self.fixed_pointers or pointer in self.inputs
        if known or tensor.device.type != self.context.device_type:
            return _SavedTensor(detached, None)
        entry = self.saved.setdefault(pointer, [0, size])
        entry[0] += 1
        name = self.module_stack[-1] if self.module_stack else "outside the model"
        if entry[0] == 1:
            self.first_saver[pointer] = name
            self._add_activation(name, size)
        return _SavedTensor(detached, partial(self._release, pointer, name))

    def _add_activation(self, name: str, size: int) -> None:
        self.activations += size
        self.by_module[name] += size
        self.modules = None
        self._sample()

    def _release(self, pointer: int, name: str) -> None:
        entry = self.saved.get(pointer)
        if entry is None:
            return
        entry[0] -= 1
        if entry[0] == 0:
            del self.saved[pointer]
            self.activations -= entry[1]
            self.by_module[self.first_saver.pop(pointer, name)] -= entry[1]
            self.modules = None

    def _sample(self) -> None:
        if self.modules is None:
            self.modules = {name: size for name, size in self.by_module.items() if size > 0}
        self.moments.append(
            MemoryMoment(
                self.clock.mark(),
                {
                    **self.fixed,
                    "gradients": sum(self.gradients.values()),
                    "activations": self.activations,
                    "inputs": sum(self.inputs.values()),
                },
                self.modules,
            )
        )

    # -- the end

    def end(self) -> dict[str, Any]:
        self.line_ledger.restore()
        cuda = self.context.device_type == "cuda"
        reserved = int(self.torch.cuda.memory_reserved(self.context.device)) if cuda else None
        stats = self.torch.cuda.memory_stats(self.context.device) if cuda else {}
        super().end()
        if len(self.tick_ends) < 2:
            return {}
        events = self.events()
        offset = self.clock_offset_ns(events)
        moments = [MemoryMoment(m.ns + offset, m.kinds, m.modules) for m in self.moments]
        start, end = self.tick_ends[-2] + offset, self.tick_ends[-1] + offset
        changes = allocations(events, self.context.device.index if self.tools.on_device else None)
        shift = self.start_bytes[-2] - bytes_at(running_totals(changes, 0), start, 0)
        totals = running_totals(changes, shift)
        memory = step_memory("device" if self.tools.on_device else "host", totals, shift, moments, start, end)
        peak_ns = max(
            (pair for pair in totals if start <= pair[0] <= end), key=lambda pair: pair[1], default=(start, 0)
        )[0]
        lines = [line for ns, line in self.lines.times if ns + offset <= peak_ns and line is not None]
        memory.peak_place = place_of(lines[-1]) if lines else None
        memory.reserved_bytes, memory.retries = reserved, stats.get("num_alloc_retries") if cuda else None
        if cuda:
            memory.at_peak["fragmentation"] = int(stats.get("inactive_split_bytes.all.peak", 0))
        return {"memory": memory.to_json()}


@dataclass
class TickWindow:
    """A tick in ns of our clock: its start, the bytes in use then, the start of its step, and its end."""

    start: int
    bytes_before: int
    step: int
    end: int


class PeakMemoryProbe(AllocationRecorder):
    """Measures the peak bytes of a step, the largest of its ticks without the first two.

    One of the first two may be the shorter last batch of an epoch. On a CUDA device it is what the allocator
    handed out (``max_memory_allocated``) plus the memory of recorded graphs. On a CPU it is the tensors alive
    when a tick began plus every later allocation. Both count parameters, gradients and optimizer state, but
    not the interpreter or a CUDA context. A step begins with its first forward pass that keeps gradients, so
    an evaluation between two epochs does not count.
    """

    def begin(self) -> None:
        super().begin()
        self.on_cuda = self.context.device_type == "cuda"
        self.bytes_before = 0
        self.step_start: int | None = None
        self.windows: list[TickWindow] = []
        self.peak = 0  # of a CUDA device

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.step_start is None:
            self.step_start = self.clock.mark()
            if self.on_cuda:
                self.torch.cuda.reset_peak_memory_stats(self.context.device)

    def tick(self) -> None:
        super().tick()
        if len(self.tick_ends) > SETTLING_TICKS:
            start, end = self.tick_ends[-2:]
            self.windows.append(TickWindow(start, self.bytes_before, self.step_start or start, end))
            if self.on_cuda:
                self.peak = max(self.peak, int(self.torch.cuda.max_memory_allocated(self.context.device)))
        elif len(self.tick_ends) == 1 and not self.on_cuda:
            self.record()
        self.bytes_before = self.in_use()
        self.step_start = None
        if self.on_cuda:
            self.torch.cuda.reset_peak_memory_stats(self.context.device)

    def end(self) -> dict[str, Any]:
        super().end()
        if not self.windows:
            return {}
        if self.on_cuda:
            return {"peak_bytes": self.peak + reserved_for_graphs(self.torch, self.context.device)}
        events = self.events()
        offset = self.clock_offset_ns(events)
        # Memory taken before the recording is never seen to be freed
        totals = running_totals(allocations(events, None), 0)
        peak = 0
        for tick in self.windows:
            shift = tick.bytes_before - bytes_at(totals, tick.start + offset, 0)
            within = [total for ns, total in totals if tick.step <= ns - offset <= tick.end]
            peak = max(peak, tick.bytes_before, shift + max(within, default=-shift))
        return {"peak_bytes": peak}
