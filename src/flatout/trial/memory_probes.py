"""Probes for memory: what fills it in a step, whether it grows from step to step, and what holds it."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from typing import Any

from flatout.capture.frames import place_of
from flatout.capture.leak_finder import LeakFinder
from flatout.capture.ledger import Ledger
from flatout.capture.lines import OperatorLines
from flatout.measure.clock import HostClock
from flatout.measure.load import resident_bytes
from flatout.measure.memory import MemoryMoment, allocations, at, running_totals, seen
from flatout.measure.parity import tensors_in
from flatout.measure.trend import chance_of_growth, keeps_growing, slope
from flatout.plan.profile import MemoryGrowth
from flatout.trial.probes import Probe

MARK = "flatout: the recording begins"
SETTLING_TICKS = 2  # memory taken before the recording is freed in the first ones
RARE = 0.001  # a rise less likely than this by chance is a trend
CUDA_BLOCK_BYTES = 512  # kMinBlockSize of torch's CUDACachingAllocator
LEAST_BYTES = 1024  # a step; less may be a logged number
LEAST_RESIDENT_BYTES = 2**21  # over all steps; the size of a process fluctuates


class AllocationRecorder(Probe):
    """A probe that records the allocations of its ticks with torch's profiler.

    ``record`` runs after a tick, never in ``begin``. A tick ends inside an operator (``Optimizer.step`` is
    one). An operator that began under one recording writes its end into that recording even after it is
    freed, if another one runs by then (torch 2.14).
    """

    def begin(self) -> None:
        self.clock = HostClock()
        self.ends: list[int] = []

    def record(self) -> None:
        self.profile = self.torch.profiler.profile(activities=self.around.activities(), profile_memory=True)
        self.profile.start()
        self.ledger.call("profiler", self.profile.stop)
        self.began = self.clock.mark()
        with self.torch.profiler.record_function(MARK):
            pass

    def tick(self) -> None:
        self.ends.append(self.clock.mark())

    def events(self) -> list[Any]:
        return list(self.profile.profiler.kineto_results.events())

    def later_ns(self, events: list[Any]) -> int:
        """Return the recording's clock minus ours."""
        return next((event.start_ns() - self.began for event in events if event.name() == MARK), 0)

    def known(self) -> dict[str, list[Any]]:
        """Return the tensors that are expected to stay alive."""
        every = {id(p): p for root in self.context.roots for p in root.parameters()} | {
            id(p): p for p in self.context.parameters
        }
        return {
            "parameters": list(every.values()),
            "gradients": [p.grad for p in every.values() if p.grad is not None],
            "buffers": [b for root in self.context.roots for b in root.buffers()],
            "optimizer state": [
                v
                for o in self.context.optimizers
                for state in o.state.values()
                for v in tensors_in(state, self.torch)
            ],
        }

    def in_use(self) -> int:
        """Return the bytes of all tensors known to Python, frozen ones too; on CUDA, of the allocator."""
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
        for thing in objects:
            if (
                issubclass(type(thing), tensor_class)
                and thing.device.type == self.context.device_type
                and thing.layout == self.torch.strided
            ):
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values())


class _Saved:
    """Stands for a tensor that autograd keeps for the backward pass, for as long as autograd keeps it."""

    __slots__ = ("gone", "tensor")

    def __init__(self, tensor: Any, gone: Any) -> None:
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
            kind: _bytes(known[kind], self.context.device_type)
            for kind in ("parameters", "buffers", "optimizer state")
        }
        self.fixed_places = {
            t.untyped_storage().data_ptr()
            for kind in known
            for t in known[kind]
            if t.layout == self.torch.strided
        }
        self.gradients = {
            id(p): _bytes([p.grad], self.context.device_type)
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

    def data_end(self, loader: Any, batch: Any) -> None:
        self._enter_inputs(batch)

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        self.gradients = {
            id(p): _bytes([p.grad], self.context.device_type)
            for p in self.context.parameters
            if p.grad is not None
        }
        self._enter_inputs((args, kwargs))
        self._sample()

    def _enter_inputs(self, batch: Any) -> None:
        found = [
            t
            for t in tensors_in(batch, self.torch)
            if t.device.type == self.context.device_type and t.layout == self.torch.strided
        ]
        self.inputs = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}

    def optimizer_begin(self, optimizer: Any) -> None:
        self._sample()

    def optimizer_end(self, optimizer: Any) -> None:
        self._sample()

    def _enters(self, module: Any, args: Any) -> None:
        self.open.append(self.names.get(id(module), type(module).__name__))

    def _leaves(self, module: Any, args: Any, output: Any) -> None:
        if self.open:
            self.open.pop()
        self._sample()

    def _accumulated(self, parameter: Any) -> None:
        if parameter.grad is not None:
            self.gradients[id(parameter)] = _bytes([parameter.grad], self.context.device_type)
        self._sample()

    def _pack(self, tensor: Any) -> Any:
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
        shift = self.befores[-2] - at(running_totals(changes, 0), start, 0)
        totals = running_totals(changes, shift)
        found = seen("device" if self.around.on_device else "host", totals, shift, moments, start, end)
        peak_ns = max(
            (pair for pair in totals if start <= pair[0] <= end), key=lambda pair: pair[1], default=(start, 0)
        )[0]
        before = [line for ns, line in self.lines.moments if ns + later <= peak_ns and line is not None]
        found.peak_place = place_of(before[-1]) if before else None
        found.reserved_bytes, found.retries = reserved, stats.get("num_alloc_retries") if cuda else None
        if cuda:
            found.at_peak["fragmentation"] = int(stats.get("inactive_split_bytes.all.peak", 0))
        return {"memory": found.to_json()}


class LeakProbe(AllocationRecorder):
    """Measures memory at the same point of each tick, and finds tensors that survive their tick.

    The first half of the ticks measures the process and the second half the tensors, because recording
    allocations itself takes memory.
    """

    def begin(self) -> None:
        self.sizes: list[float] = []  # of the device
        self.resident: list[float] = []
        self.holders = LeakFinder(
            self.torch,
            [loader.dataset for loader in self.context.live_loaders if hasattr(loader.dataset, "__dict__")],
        )
        self.half = self.ticks // 2
        last = self.ticks - self.half - 1
        self.looks = {round(SETTLING_TICKS + part * (last - SETTLING_TICKS) / 3) for part in range(4)}
        super().begin()

    def tick(self) -> None:
        if len(self.resident) < self.half:
            self.resident.append(float(resident_bytes()))
            if len(self.resident) == self.half:
                self.record()
            return
        super().tick()
        if len(self.ends) - 1 in self.looks:
            self.holders.look(len(self.ends))
        if self.context.device_type == "cuda":
            self.sizes.append(
                float(self.torch.cuda.memory_allocated(self.context.device) - _blocks(self.around.ours()))
            )

    def end(self) -> dict[str, Any]:
        held = self.holders.found(
            [*(tensor for tensors in self.known().values() for tensor in tensors), *self.around.ours()]
        )
        super().end()
        series = self.sizes
        if self.context.device_type != "cuda":
            events = self.events()
            later, totals = self.later_ns(events), running_totals(allocations(events, None), 0)
            series = [float(at(totals, end + later, 0)) for end in self.ends]
        series, resident = series[SETTLING_TICKS:], self.resident
        rise = slope(series)
        grows = keeps_growing(series, RARE) and rise >= LEAST_BYTES
        leak = MemoryGrowth(
            rise,
            chance_of_growth(series),
            grows or bool(held and held.graph),
            series=series,
            steps=len(series),
            where="device" if self.around.on_device else "host",
        )
        if held is not None:
            leak.holder, leak.place, leak.graph, leak.tensors_a_step = (
                held.holder,
                held.place,
                held.graph,
                held.tensors_a_step,
            )
        grown = max(resident, default=0) - min(resident, default=0) > LEAST_RESIDENT_BYTES
        host = MemoryGrowth(
            slope(resident),
            chance_of_growth(resident),
            keeps_growing(resident, RARE) and grown,
            series=resident,
            steps=len(resident),
        )
        fullest = self.holders.fullest() if host.leaking else None
        if fullest is not None:
            host.holder, host.place = fullest.holder, fullest.place
        return {"leak": leak.to_json(), "host_growth": host.to_json()}


def _blocks(tensors: list[Any]) -> int:
    """Return the bytes of CUDA allocator blocks of some tensors; the four bytes of a loss take a block."""
    sizes = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tensors
        if t.device.type == "cuda"
    }
    return sum(-(-size // CUDA_BLOCK_BYTES) * CUDA_BLOCK_BYTES for size in sizes.values())


def _bytes(tensors: Any, device_type: str) -> int:
    """Return the bytes of the storages of some tensors, each counted once."""
    places = {}
    for tensor in tensors:
        if tensor is not None and tensor.device.type == device_type and str(tensor.layout) == "torch.strided":
            storage = tensor.untyped_storage()
            places[storage.data_ptr()] = storage.nbytes()
    return sum(places.values())
