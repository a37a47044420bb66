"""Tracks the memory of one step that runs on fake tensors."""

from __future__ import annotations

import gc
import weakref
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.fake_execution import FakeExecution
from flatout.measure.memory_blocks import (
    TEMPORARY,
    MemoryBlock,
    MemoryBlockTracker,
    Peak,
)
from flatout.measure.nests import tensors_in
from flatout.trial.spec import TrialSpec
from flatout.trial.worker import Worker

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

HELD = "held by the program"


class TrackedStep(Worker):
    """Tracks storages of a step by module."""

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
        return self.blocks.take(
            size_bytes,
            self.kind_of_real if real else TEMPORARY,
            self.open[-1] if self.open else "outside the model",
        )

    def _gone(self, block: MemoryBlock) -> None:
        self.blocks.give_back(block)

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
            self.blocks.outlived("activations", self.outermost)
