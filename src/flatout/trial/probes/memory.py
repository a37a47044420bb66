"""Probes for memory: what fills it in a step, whether it grows from step to step, and what holds it."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import place_of
from flatout.agent.ledger import Ledger
from flatout.agent.lines import OperatorLines
from flatout.measure.memory import MemoryMoment, allocations, bytes_at, running_totals, step_memory
from flatout.measure.nests import tensors_in
from flatout.trial.probes.allocations import AllocationRecorder, storage_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


class _Saved:
    """Stands for a tensor that autograd keeps for the backward pass, for as long as autograd keeps it."""

    __slots__ = ("gone", "tensor")

    def __init__(self, tensor: Tensor, gone: Any) -> None:
        self.tensor, self.gone = tensor, gone

    def __del__(self) -> None:
        if self.gone is not None:
            self.gone()


class MemoryProbe(AllocationRecorder):
    """Records what fills the memory in the last of its ticks. It ignores the first one."""

    def begin(self) -> None:
        super().begin()
        self.names = {
            id(m): name or type(root).__name__
            for root in self.context.roots
            for name, m in self.context.without_ranks(root).named_modules()
        }
        self.open: list[str] = []
        self.activations = 0
        self.by_module: Counter[str] = Counter()
        self.modules: dict[str, int] | None = None  # a copy of by_module while it is current
        self.fixed: dict[str, int] = {}  # kind -> bytes, constant within a tick
        self.befores: list[int] = []  # bytes in use as each tick begins
        self.saved: dict[int, list[int]] = {}  # address of a storage -> times saved, bytes
        self.owner: dict[int, str] = {}  # address of a storage -> the module that saved it first
        self.inputs: dict[int, int] = {}
        self.gradients: dict[int, int] = {}
        self.moments: list[MemoryMoment] = []
        self.listening_to_lines = Ledger()
        self.lines = OperatorLines(self.torch, self.listening_to_lines, self.clock.mark)
        self.recording = False

    def record(self) -> None:
        super().record()
        self.recording = True
        modules = self.torch.nn.modules.module
        if not self.context.compiled_by_script:  # global hooks would cause a recompilation
            self.ledger.call(
                "forward pre-hook", modules.register_module_forward_pre_hook(self._enters).remove
            )
            self.ledger.call(
                "forward hook", modules.register_module_forward_hook(self._leaves, always_call=True).remove
            )
        for parameter in self.context.parameters:
            if parameter.is_leaf:
                self.ledger.call(
                    "gradient hook", parameter.register_post_accumulate_grad_hook(self._accumulated).remove
                )
        hooks = self.torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        hooks.__enter__()
        self.ledger.call("saved_tensors_hooks", partial(hooks.__exit__, None, None, None))
        self._settle()

    def _settle(self) -> None:
        """Between two ticks, count again what stays alive."""
        known = self.known()
        self.fixed = {
            kind: storage_bytes(known[kind], self.context.device_type)
            for kind in ("parameters", "buffers", "optimizer state")
        }
        self.fixed_places = {
            t.untyped_storage().data_ptr()
            for kind in known
            for t in known[kind]
            if t.layout == self.torch.strided
        }
        self.gradients = {
            id(p): storage_bytes([p.grad], self.context.device_type)
            for p in known["parameters"]
            if p.grad is not None
        }
        self.befores.append(self.in_use())
        self._sample()

    def tick(self) -> None:
        if not self.recording:
            self.record()
            return
        super().tick()
        self.listening_to_lines.restore()  # tensors must not be inspected under a dispatch mode
        self._settle()
        if len(self.ends) == self.ticks - 2 and not self.context.compiled_by_script:
            self.lines.install()

    # -- events of a step ------------------------------------------------------------------------------------------------

    def data_end(self, loader: DataLoader, batch: object) -> None:
        self._enter_inputs(batch)

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.gradients = {
            id(p): storage_bytes([p.grad], self.context.device_type)
            for p in self.context.parameters
            if p.grad is not None
        }
        self._enter_inputs((args, kwargs))
        self._sample()

    def _enter_inputs(self, batch: object) -> None:
        found = [
            t
            for t in tensors_in(batch)
            if t.device.type == self.context.device_type and t.layout == self.torch.strided
        ]
        self.inputs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        self._sample()

    def optimizer_end(self, optimizer: Optimizer) -> None:
        self._sample()

    def _enters(self, module: Module, args: object) -> None:
        self.open.append(self.names.get(id(module), type(module).__name__))

    def _leaves(self, module: Module, args: object, output: object) -> None:
        if self.open:
            self.open.pop()
        self._sample()

    def _accumulated(self, parameter: Parameter) -> None:
        if parameter.grad is not None:
            self.gradients[id(parameter)] = storage_bytes([parameter.grad], self.context.device_type)
        self._sample()

    def _pack(self, tensor: Tensor) -> Any:
        try:
            storage = tensor.untyped_storage()
            place, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # a tensor without memory, for example one being traced
            return _Saved(tensor, None)
        kept = tensor.detach()  # an output that references itself is never freed
        if (
            place in self.fixed_places
            or place in self.inputs
            or tensor.device.type != self.context.device_type
        ):
            return _Saved(kept, None)
        times = self.saved.setdefault(place, [0, size])
        times[0] += 1
        name = self.open[-1] if self.open else "outside the model"
        if times[0] == 1:
            self.owner[place] = name
            self._grow(name, size)
        return _Saved(kept, partial(self._dropped, place, name))

    def _grow(self, name: str, size: int) -> None:
        self.activations += size
        self.by_module[name] += size
        self.modules = None
        self._sample()

    def _dropped(self, place: int, name: str) -> None:
        times = self.saved.get(place)
        if times is None:
            return
        times[0] -= 1
        if times[0] == 0:
            del self.saved[place]
            self.activations -= times[1]
            self.by_module[self.owner.pop(place, name)] -= times[1]
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

    # -- the end --------------------------------------------------------------------------------------------------------

    def end(self) -> dict[str, Any]:
        self.listening_to_lines.restore()
        cuda = self.context.device_type == "cuda"
        reserved = int(self.torch.cuda.memory_reserved(self.context.device)) if cuda else None
        stats = self.torch.cuda.memory_stats(self.context.device) if cuda else {}
        super().end()
        if len(self.ends) < 2:
            return {}
        events = self.events()
        later = self.later_ns(events)
        moments = [MemoryMoment(m.ns + later, m.kinds, m.modules) for m in self.moments]
        start, end = self.ends[-2] + later, self.ends[-1] + later
        changes = allocations(events, self.context.device.index if self.around.on_device else None)
        shift = self.befores[-2] - bytes_at(running_totals(changes, 0), start, 0)
        totals = running_totals(changes, shift)
        found = step_memory("device" if self.around.on_device else "host", totals, shift, moments, start, end)
        peak_ns = max(
            (pair for pair in totals if start <= pair[0] <= end), key=lambda pair: pair[1], default=(start, 0)
        )[0]
        before = [line for ns, line in self.lines.moments if ns + later <= peak_ns and line is not None]
        found.peak_place = place_of(before[-1]) if before else None
        found.reserved_bytes, found.retries = reserved, stats.get("num_alloc_retries") if cuda else None
        if cuda:
            found.at_peak["fragmentation"] = int(stats.get("inactive_split_bytes.all.peak", 0))
        return {"memory": found.to_json()}
