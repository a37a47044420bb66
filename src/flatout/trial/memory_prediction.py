"""Predicts memory inside the program: from its first batch on, nothing is computed any more.

The first batch is really fetched. Then the program continues with operators that run on shapes alone
(agent/fake_execution.py), and receives this batch repeatedly, in the requested size. There is one command
besides ``finish``:

    {"do": "predict_memory", "batch": n}   two steps with n samples a batch (None: unchanged); returns their memory

The second step counts, because in the first the optimizer creates its state. At the end everything that the
program can see is restored: gradients and the state of its optimizers. Parameters, buffers and random state
were never changed.
"""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.batches import resized, samples_in
from flatout.agent.fake_execution import FakeExecution
from flatout.measure.memory_blocks import (
    CUDA_ROUNDING_BYTES,
    TEMPORARY,
    MemoryBlock,
    MemoryBlockTracker,
)
from flatout.measure.nests import tensors_in
from flatout.schema.facts import Gpu
from flatout.trial.spec import TrialSpec
from flatout.trial.worker import Worker
from flatout.trial.worker_commands import finish

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

ENTRY = "flatout.trial.memory_prediction:attach"
STEPS = 2  # the first one creates the optimizer's state
UNCLASSIFIED = "held by the program"
MAX_BATCHES = 4096  # of one batch size; a step that takes more never ends


def cublas_bytes(gpu: Gpu | None) -> int:
    """Bytes of each workspace that torch gives cuBLAS (aten/src/ATen/cuda/CublasHandlePool.cpp).

    It is a tensor for the allocator, and stays."""
    if (config := os.environ.get("CUBLAS_WORKSPACE_CONFIG")) is not None:
        return sum(1024 * int(kib) * int(count) for kib, count in re.findall(r":(\d+):(\d+)", config))
    return 0 if gpu is None else 32 * 2**20 if gpu.capability in ((9, 0), (10, 0)) else 8320 * 2**10


def attach(job: dict[str, Any]) -> None:
    """The entry that the bootstrap calls right after ``import torch``."""
    import torch

    MemoryPredictor(TrialSpec.from_json(job), torch).attach()


class MemoryPredictor(Worker):
    """Runs the program with fake tensors, and tracks their storages by module.

    ``fake_execution`` is None until the first batch. ``requested_size`` is the batch size given to the program, None for
    its own.
    """

    def __init__(self, spec: TrialSpec, torch: ModuleType) -> None:
        super().__init__(spec, torch)
        self.simulated = False  # sizes as of torch's CUDA allocator although the program is on the CPU
        self.blocks = MemoryBlockTracker()
        self.fake_execution: FakeExecution | None = None
        self.samples: int | None = None  # in a batch, as the program makes it
        self.loader: int | None = None  # the number of the loader of the first batch
        self.length: int | None = None  # samples of its data set
        self.requested_size: int | None = None
        self.steps_left = 0
        self.batch_count = 0
        self.step_event = 0  # the event at its start
        self.ledger_mark = 0  # length of the ledger before
        self.module_stack: list[str] = []  # modules inside their forward pass
        self.forward_event = 0  # the event at which the outermost one was entered
        self.names: dict[int, str] = {}
        self.real_kind = UNCLASSIFIED
        self.cublas_bytes, self.in_backward, self.with_workspace = 0, False, set[bool]()
        # Iterator -> its first batch
        self._first_batches: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def attach(self) -> None:
        super().attach()
        self._observe_fetching()

    # -- batches

    def _observe_fetching(self) -> None:
        self.context.wrap_loader_method("batch", self._wrap_batch, self.ledger)
        self.context.wrap_loader_method("epoch", self._wrap_epoch, self.ledger)

    def _wrap_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def next_batch(iterator: object) -> Any:
            training = self.torch.is_grad_enabled() and not self.context.paused
            if self.fake_execution is None:
                batch = original(iterator)
                if training:
                    self._begin_prediction(batch, iterator)
                    return self._repeat_batch(iterator)
                return batch
            if training and iterator in self._first_batches:
                return self._repeat_batch(iterator)
            with self.fake_execution.real_execution():
                batch = original(iterator)
            if training:
                self._first_batches[iterator] = batch
                return self._repeat_batch(iterator)
            return batch

        return next_batch

    def _wrap_epoch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def iter_loader(loader: DataLoader) -> Any:
            if self.fake_execution is None:
                return original(loader)
            with self.fake_execution.real_execution():
                return original(loader)

        return iter_loader

    def _repeat_batch(self, iterator: object) -> Any:
        self.batch_count += 1
        if self.batch_count > MAX_BATCHES:
            raise LookupError(f"a step of this program took more than {MAX_BATCHES} batches")
        batch = self._first_batches[iterator]
        samples = samples_in(batch, self.samples) or 1
        return resized(
            batch, samples, self.requested_size or samples, partial(self._fake_input, samples=samples)
        )

    # -- entering

    def _begin_prediction(self, batch: object = None, iterator: Any = None) -> None:
        """Count what is alive, and stop computing from here on."""
        if iterator is not None:
            loader = next(
                (loader for loader in self.context.live_loaders if loader.dataset is iterator._dataset), None
            )
            self.samples = samples_in(batch, getattr(loader, "batch_size", None))
            self.loader = self.context.number_of_loader(loader)
            self.length = self.context.loaders[self.loader]["length"] if self.loader is not None else None
            self._first_batches[iterator] = batch
        self._claim()
        self.ledger_mark = self.ledger.mark()
        self._save_state()
        device_type = self.context.device_type
        self.simulated = bool(self.spec.requested.get("cuda")) and device_type != "cuda"
        if self.simulated or device_type == "cuda":
            self.blocks = MemoryBlockTracker(CUDA_ROUNDING_BYTES)
            self.cublas_bytes = cublas_bytes(self.spec.facts.gpu(self.context.device.index))
        self.fake_execution = FakeExecution(
            self.torch,
            self.ledger,
            self._allocated,
            self._freed,
            device_type,
            not self.simulated,
            self._multiplies,
        )
        self._count_live(batch)
        self.real_kind = "inputs"  # later real tensors are made by the program from its data
        modules = self.torch.nn.modules.module
        self.ledger.on_restore(
            "forward pre-hook", modules.register_module_forward_pre_hook(self._module_begins).remove
        )
        self.ledger.on_restore(
            "forward hook", modules.register_module_forward_hook(self._module_ends, always_call=True).remove
        )
        self._disable_compilers()
        if self.simulated:
            self._use_foreach()
        self.fake_execution.install()
        self.send(
            {
                "ready": True,
                "unit": "step",
                "ticks": 0,
                "tick_ms": 0.0,
                "device": device_type,
                "device_index": self.context.device.index,
                "samples": self.samples,
                "loader": self.loader,
                "length": self.length,
                "simulated": self.simulated,
                "why_not": self._why_not(),
            }
        )
        self._run_commands()

    # -- blocks

    def _fake_input(self, tensor: Tensor, dimension: int | None, samples: int) -> Any:
        """A tensor of the batch without memory.

        Integers keep their values, because shapes may depend on them.
        """
        assert self.fake_execution is not None
        torch, new_size = self.torch, self.requested_size or samples
        if tensor.layout != torch.strided:
            return tensor
        shape = [new_size if i == dimension else size for i, size in enumerate(tensor.shape)]
        fake = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        block = self.fake_execution.block_of(fake)
        if block is not None:
            block.kind = "inputs"
        with self.fake_execution.real_execution():
            value = tensor.detach()
            if self.fake_execution.values.worth_keeping(value):
                if dimension is not None and new_size != samples:
                    value = value.index_select(dimension, torch.arange(new_size, device="cpu") % samples)
                self.fake_execution.values.set(fake, value.clone())
        return fake

    def _why_not(self) -> str:
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            return "it trains on several ranks, whose messages are not available without computing them"
        return ""

    def _disable_compilers(self) -> None:
        """Run compiled functions uncompiled, because compilation would see tensors without memory."""
        compiler = self.torch.compiler
        compiler.set_stance("force_eager")
        self.ledger.on_restore("compiler's stance", lambda: compiler.set_stance("default"))

    def _use_foreach(self) -> None:
        """Use foreach optimizers, as is torch's default on CUDA; they need lists of temporary tensors."""
        from torch.optim import optimizer

        devices = optimizer._get_foreach_kernels_supported_devices()
        self.ledger.set(optimizer, "_get_foreach_kernels_supported_devices", lambda: [*devices, "cpu"])

    def _save_state(self) -> None:
        """Save what the program gets back at the end: gradients and the state of its optimizers."""
        gradients = [(p, p.grad) for p in self.context.parameters]
        states = [
            (o, {p: dict(state) if isinstance(state, dict) else state for p, state in o.state.items()})
            for o in self.context.optimizers
        ]

        def restore() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer, state in states:
                optimizer.state.clear()
                optimizer.state.update(state)

        self.ledger.on_restore("gradients and optimizer state", restore)

    def _count_live(self, batch: object) -> None:
        """Count every tensor on the device by its purpose.

        The data set of a program that runs on the CPU is not part of a simulated device.
        """
        assert self.fake_execution is not None
        torch, kinds = self.torch, {}
        batch_ids = {id(tensor) for tensor in tensors_in(batch)}
        objects = gc.get_objects()
        for module in objects:
            if issubclass(type(module), torch.nn.Module):
                kinds.update({id(b): "buffers" for b in module._buffers.values() if b is not None})
        for parameter in [
            obj for obj in objects if issubclass(type(obj), torch.nn.Parameter)
        ] + self.context.parameters:
            kinds[id(parameter)] = "parameters"
            if parameter.grad is not None:
                kinds[id(parameter.grad)] = "gradients"
        for optimizer in self.context.optimizers:
            for state in optimizer.state.values():
                kinds.update({id(v): "optimizer state" for v in tensors_in(state)})
        tensors = [obj for obj in objects if issubclass(type(obj), torch.Tensor) and id(obj) not in batch_ids]
        # A storage has the purpose of its first tensor
        for tensor in sorted(tensors, key=lambda tensor: id(tensor) not in kinds):
            self.real_kind = kinds.get(id(tensor), UNCLASSIFIED)
            if self.real_kind != UNCLASSIFIED or not self.simulated:
                self.fake_execution.count_real(tensor)

    def _allocated(self, size_bytes: int, is_real: bool) -> MemoryBlock:
        return self.blocks.allocate(
            size_bytes,
            self.real_kind if is_real else TEMPORARY,
            self.module_stack[-1] if self.module_stack else "outside the model",
        )

    def _multiplies(self) -> None:
        """Allocate cuBLAS's workspace of this thread: the script's, or the one that computes gradients."""
        if self.cublas_bytes and self.in_backward not in self.with_workspace:
            self.with_workspace.add(self.in_backward)
            self.blocks.allocate(self.cublas_bytes, "cuBLAS workspaces")

    def _freed(self, block: MemoryBlock) -> None:
        self.blocks.free(block)

    def _set_kind(self, tensors: list[Tensor], kind: str) -> None:
        assert self.fake_execution is not None
        for tensor in tensors:
            block = self.fake_execution.block_of(tensor) if tensor is not None else None
            if block is not None:
                block.kind = kind

    def _module_begins(self, module: Module, args: object) -> None:
        if not self.module_stack:
            self.forward_event = self.blocks.events
        self.module_stack.append(self.names.get(id(module)) or type(module).__name__)

    def _module_ends(self, module: Module, args: object, output: object) -> None:
        if self.module_stack:
            self.module_stack.pop()
        if not self.module_stack:
            self.blocks.classify_survivors("activations", self.forward_event)

    # -- the program's events

    def data_begin(self, loader: DataLoader) -> None: ...
    def data_end(self, loader: DataLoader, batch: object) -> None: ...
    def forward_end(self, root: Module, output: object) -> None: ...
    def optimizer_begin(self, optimizer: Optimizer) -> None: ...

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.fake_execution is None:
            self._begin_prediction()
        if id(root) not in self.names:
            for name, module in root.named_modules():
                self.names[id(module)] = ".".join(filter(None, [type(root).__name__, name]))

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self.in_backward = True
        if (
            self.fake_execution is not None
        ):  # otherwise a model without modules, unknown until its first step ends
            self.blocks.classify_survivors("activations", self.step_event)

    def backward_end(self) -> None:
        self.in_backward = False
        if self.fake_execution is not None:
            self._set_kind([p.grad for p in self.context.parameters], "gradients")
            if self.context.closure_steps:  # a step may have hundreds of passes, of the same memory
                self._end_step("backward")

    def optimizer_end(self, optimizer: Optimizer) -> None:
        if self.fake_execution is not None:
            self._set_kind(
                [v for state in optimizer.state.values() for v in tensors_in(state)], "optimizer state"
            )

    def step_end(self) -> None:
        if self.fake_execution is None:
            self._begin_prediction()
            return
        if self.stopping:
            os._exit(0)  # the program swallowed StopTrial
        if not self.context.closure_steps:
            self._end_step("step")

    def _end_step(self, unit: str) -> None:
        self.steps_left -= 1
        if self.steps_left > 0 and self.fake_execution is not None:
            self.fake_execution.measure_workspaces()
            self._begin_step()
            return
        peak = self.blocks.peak()
        self.send(
            {
                "batch": self.requested_size or self.samples,
                "unit": unit,
                "peak_bytes": peak.peak_bytes,
                "kinds": peak.kinds,
                "by_module": peak.by_module,
                "guessed": sorted(self.fake_execution.values.guesses) if self.fake_execution else [],
            }
        )
        self._run_commands()

    def _begin_step(self) -> None:
        self.blocks.reset_peak()
        self.step_event = self.blocks.events
        self.batch_count = 0

    def _run_commands(self) -> None:
        while True:
            command = self.next_command()
            if command["do"] == "predict_memory":
                self.requested_size, self.steps_left = command.get("batch"), STEPS
                self._begin_step()
                return
            if command["do"] == "finish":
                self.ledger.restore(self.ledger_mark)
                self.fake_execution, self.context.paused = None, True
                finish(self)
            self.send({"error": f"unknown command {command['do']!r}"})
