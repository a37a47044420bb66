"""Predicts memory inside the program: from its first batch on, nothing is computed any more.

The first batch is really fetched. Then the program continues with operators that run on shapes alone
(agent/fake_execution.py), and receives this batch repeatedly, in the requested size. There are two commands
besides ``finish``:

    {"do": "foresee", "batch": n}   two steps with n samples a batch (None: unchanged); returns their memory

The second step counts, because in the first the optimizer creates its state. At the end everything that the
program can see is restored: gradients and the state of its optimizers. Parameters, buffers and random state
were never changed.
"""

from __future__ import annotations

import gc
import os
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
    Peak,
)
from flatout.measure.nests import tensors_in
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
HELD = "held by the program"
MOST_BATCHES = 4096  # of one batch size; a step that takes more never ends


def attach(job: dict[str, Any]) -> None:
    """The entry that the bootstrap calls right after ``import torch``."""
    import torch

    MemoryPredictor(TrialSpec.from_json(job), torch).attach()


class MemoryPredictor(Worker):
    """Runs the program with fake tensors, and tracks their storages by module.

    ``pretended`` is None until the first batch. ``asked`` is the batch size given to the program, None for
    its own.
    """

    def __init__(self, spec: TrialSpec, torch: ModuleType) -> None:
        super().__init__(spec, torch)
        self.simulated = False  # sizes as of torch's CUDA allocator although the program is on the CPU
        self.blocks = MemoryBlockTracker()
        self.pretended: FakeExecution | None = None
        self.samples: int | None = None  # in a batch, as the program makes it
        self.loader: int | None = None  # the number of the loader of the first batch
        self.length: int | None = None  # samples of its data set
        self.asked: int | None = None
        self.steps_left = 0
        self.batches_given = 0
        self.step_began = 0  # the event at its start
        self.ordinary = 0  # length of the ledger before
        self.first: Peak | None = None
        self.open: list[str] = []  # modules inside their forward pass
        self.outermost = 0  # the event at which the outermost one was entered
        self.names: dict[int, str] = {}
        self.kind_of_real = HELD
        # Iterator -> its first batch
        self._repeated: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def attach(self) -> None:
        super().attach()
        self._observe_fetching()

    # -- batches --------------------------------------------------------------------------------------------------------

    def _observe_fetching(self) -> None:
        self.context.around_loaders("batch", self._wrap_batch, self.ledger)
        self.context.around_loaders("epoch", self._wrap_epoch, self.ledger)

    def _wrap_batch(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def next_pretended(iterator: object) -> Any:
            training = self.torch.is_grad_enabled() and not self.context.asleep
            if self.pretended is None:
                batch = take(iterator)
                if training:
                    self._enter(batch, iterator)
                    return self._again(iterator)
                return batch
            if training and iterator in self._repeated:
                return self._again(iterator)
            with self.pretended.really():
                batch = take(iterator)
            if training:
                self._repeated[iterator] = batch
                return self._again(iterator)
            return batch

        return next_pretended

    def _wrap_epoch(self, begin: Callable[..., Any]) -> Callable[..., Any]:
        def iter_pretended(loader: DataLoader) -> Any:
            if self.pretended is None:
                return begin(loader)
            with self.pretended.really():
                return begin(loader)

        return iter_pretended

    def _again(self, iterator: object) -> Any:
        """Return the batch of this iterator, in the requested size, without memory."""
        self.batches_given += 1
        if self.batches_given > MOST_BATCHES:
            raise LookupError(f"a step of this program took more than {MOST_BATCHES} batches")
        batch = self._repeated[iterator]
        samples = samples_in(batch, self.samples) or 1
        return resized(batch, samples, self.asked or samples, partial(self._input, samples=samples))

    # -- entering -------------------------------------------------------------------------------------------------------

    def _enter(self, batch: object = None, iterator: Any = None) -> None:
        """Count what is alive, and stop computing from here on."""
        if iterator is not None:
            loader = next(
                (loader for loader in self.context.live_loaders if loader.dataset is iterator._dataset), None
            )
            self.samples = samples_in(batch, getattr(loader, "batch_size", None))
            self.loader = self.context.number_of_loader(loader)
            self.length = self.context.loaders[self.loader]["length"] if self.loader is not None else None
            self._repeated[iterator] = batch
        self._claim()
        self.ordinary = self.ledger.mark()
        self._save()
        device_type = self.context.device_type
        self.simulated = bool(self.spec.requested.get("cuda")) and device_type != "cuda"
        if self.simulated or device_type == "cuda":
            self.blocks = MemoryBlockTracker(CUDA_ROUNDING_BYTES)
        self.pretended = FakeExecution(
            self.torch, self.ledger, self._born, self._gone, device_type, not self.simulated
        )
        self._count_what_lives(batch)
        self.kind_of_real = "inputs"  # later real tensors are made by the program from its data
        modules = self.torch.nn.modules.module
        self.ledger.call(
            "forward pre-hook", modules.register_module_forward_pre_hook(self._module_begins).remove
        )
        self.ledger.call(
            "forward hook", modules.register_module_forward_hook(self._module_ends, always_call=True).remove
        )
        self._leave_compilers_out()
        if self.simulated:
            self._as_on_cuda()
        self.pretended.install()
        self.answer(
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
        self._obey()

    # -- blocks ---------------------------------------------------------------------------------------------------------

    def _input(self, tensor: Tensor, dimension: int | None, samples: int) -> Any:
        """Return a tensor of the batch without memory.

        Integers keep their values, because shapes may depend on them.
        """
        assert self.pretended is not None
        torch, wanted = self.torch, self.asked or samples
        if tensor.layout != torch.strided:
            return tensor
        shape = [wanted if at == dimension else size for at, size in enumerate(tensor.shape)]
        made = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        block = self.pretended.block_of(made)
        if block is not None:
            block.kind = "inputs"
        with self.pretended.really():
            value = tensor.detach()
            if self.pretended.known.worth_keeping(value):
                if dimension is not None and wanted != samples:
                    value = value.index_select(dimension, torch.arange(wanted, device="cpu") % samples)
                self.pretended.known.set(made, value.clone())
        return made

    def _why_not(self) -> str:
        distributed = self.torch.distributed
        if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
            return "it trains on several ranks, whose messages are not available without computing them"
        return ""

    def _leave_compilers_out(self) -> None:
        """Run compiled functions uncompiled, because compilation would see tensors without memory."""
        compiler = self.torch.compiler
        compiler.set_stance("force_eager")
        self.ledger.call("compiler's stance", lambda: compiler.set_stance("default"))

    def _as_on_cuda(self) -> None:
        """Use foreach optimizers, as is torch's default on CUDA; they need lists of temporary tensors."""
        from torch.optim import optimizer

        known = optimizer._get_foreach_kernels_supported_devices()
        self.ledger.set(optimizer, "_get_foreach_kernels_supported_devices", lambda: [*known, "cpu"])

    def _save(self) -> None:
        """Save what the program gets back at the end: gradients and the state of its optimizers."""
        gradients = [(p, p.grad) for p in self.context.parameters]
        states = [
            (
                optimizer,
                {
                    p: dict(state) if isinstance(state, dict) else state
                    for p, state in optimizer.state.items()
                },
            )
            for optimizer in self.context.optimizers
        ]

        def put_back() -> None:
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for optimizer, state in states:
                optimizer.state.clear()
                optimizer.state.update(state)

        self.ledger.call("gradients and optimizer state", put_back)

    def _count_what_lives(self, batch: object) -> None:
        """Count every tensor on the device by its purpose.

        The data set of a program that runs on the CPU is not part of a simulated device.
        """
        assert self.pretended is not None
        torch, kinds = self.torch, {}
        given = {id(tensor) for tensor in tensors_in(batch)}
        things = gc.get_objects()
        for module in things:
            if issubclass(type(module), torch.nn.Module):
                kinds.update({id(b): "buffers" for b in module._buffers.values() if b is not None})
                kinds.update({id(p): "parameters" for p in module._parameters.values() if p is not None})
        for parameter in [
            thing for thing in things if issubclass(type(thing), torch.nn.Parameter)
        ] + self.context.parameters:
            kinds[id(parameter)] = "parameters"
            if parameter.grad is not None:
                kinds[id(parameter.grad)] = "gradients"
        kinds.update(
            {
                id(v): "optimizer state"
                for o in self.context.optimizers
                for state in o.state.values()
                for v in tensors_in(state)
            }
        )
        tensors = [
            thing for thing in things if issubclass(type(thing), torch.Tensor) and id(thing) not in given
        ]
        # A storage has the purpose of its first tensor
        for tensor in sorted(tensors, key=lambda tensor: id(tensor) not in kinds):
            self.kind_of_real = kinds.get(id(tensor), HELD)
            if self.kind_of_real != HELD or not self.simulated:
                self.pretended.count_real(tensor)

    def _born(self, size_bytes: int, real: bool) -> MemoryBlock:
        return self.blocks.allocate(
            size_bytes,
            self.kind_of_real if real else TEMPORARY,
            self.open[-1] if self.open else "outside the model",
        )

    def _gone(self, block: MemoryBlock) -> None:
        self.blocks.free(block)

    def _are(self, tensors: list[Tensor], kind: str) -> None:
        assert self.pretended is not None
        for tensor in tensors:
            block = self.pretended.block_of(tensor) if tensor is not None else None
            if block is not None:
                block.kind = kind

    def _module_begins(self, module: Module, args: object) -> None:
        if not self.open:
            self.outermost = self.blocks.events
        self.open.append(self.names.get(id(module)) or type(module).__name__)

    def _module_ends(self, module: Module, args: object, output: object) -> None:
        if self.open:
            self.open.pop()
        if not self.open:
            self.blocks.classify_survivors("activations", self.outermost)

    # -- the program's events -------------------------------------------------------------------------------------------

    def data_begin(self, loader: DataLoader) -> None: ...
    def data_end(self, loader: DataLoader, batch: object) -> None: ...
    def forward_end(self, root: Module, output: object) -> None: ...
    def optimizer_begin(self, optimizer: Optimizer) -> None: ...

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.pretended is None:
            self._enter()
        if id(root) not in self.names:
            self.names.update(
                {
                    id(module): ".".join(filter(None, [type(root).__name__, name]))
                    for name, module in root.named_modules()
                }
            )

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        if self.pretended is not None:  # otherwise a model without modules, unknown until its first step ends
            self.blocks.classify_survivors("activations", self.step_began)

    def backward_end(self) -> None:
        if self.pretended is not None:
            self._are([p.grad for p in self.context.parameters], "gradients")
            if (
                self.context.closure_steps
            ):  # a step may have hundreds of passes, which all take the same memory
                self._step_done("backward")

    def optimizer_end(self, optimizer: Optimizer) -> None:
        if self.pretended is not None:
            self._are(
                [v for state in optimizer.state.values() for v in tensors_in(state)],
                "optimizer state",
            )

    def step_end(self) -> None:
        if self.pretended is None:
            self._enter()
            return
        if self.stopping:
            os._exit(0)  # the program swallowed StopTrial
        if not self.context.closure_steps:
            self._step_done("step")

    def _step_done(self, unit: str) -> None:
        self.steps_left -= 1
        if self.steps_left == STEPS - 1:
            self.first = self.blocks.peak()
        if self.steps_left > 0 and self.pretended is not None:
            self.pretended.learn_workspaces()
            self._begin_step()
            return
        found, first = self.blocks.peak(), self.first or self.blocks.peak()
        self.answer(
            {
                "batch": self.asked or self.samples,
                "unit": unit,
                "peak_bytes": found.peak_bytes,
                "first_peak_bytes": first.peak_bytes,
                "kinds": found.kinds,
                "by_module": found.by_module,
                "guessed": sorted(self.pretended.known.guessed) if self.pretended else [],
            }
        )
        self._obey()

    def _begin_step(self) -> None:
        self.blocks.reset_peak()
        self.step_began = self.blocks.events
        self.batches_given = 0

    def _obey(self) -> None:
        while True:
            command = self.next_command()
            if command["do"] == "foresee":
                self.asked, self.steps_left = command.get("batch"), STEPS
                self._begin_step()
                return
            if command["do"] == "finish":
                self.ledger.restore(self.ordinary)
                self.pretended, self.context.asleep = None, True
                finish(self)
            self.answer({"error": f"unknown command {command['do']!r}"})
