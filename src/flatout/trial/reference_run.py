"""The reference run: records what the first steps of a program compute, to compare two ways of running it.

It trains a few steps (``steps``, fewer if they take longer than ``seconds``) and stops. It returns the loss
of every backward pass, and a sketch of the gradients at the first optimizer step, after clipping. The sketch
has ``SKETCH_SUMS`` sums per parameter: every linear property of the gradient shows in it, and it fits into JSON.
``weight_ulps`` changes every weight by up to this many units of its last place before its first use, to see
how far the program amplifies rounding.
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.distributed.single_process import one_device
from flatout.guard.captured_steps import perturb_weights
from flatout.measure.clock import seconds
from flatout.trial.spec import TrialSpec
from flatout.trial.worker import Worker
from flatout.trial.worker_commands import finish

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

ENTRY = "flatout.trial.reference_run:attach"
SKETCH_SUMS = 64
STEPS = 4
BY_LAUNCHER, IN_CHILDREN, BY_GROUP = "launcher", "children", "group"  # how a program creates its own ranks
MAX_PASSES = 4  # of a program whose step is a closure of many passes


def attach(job: dict[str, Any]) -> None:
    """The entry that the bootstrap calls right after ``import torch``."""
    import torch

    ReferenceRun(TrialSpec.from_json(job), torch).attach()


class ReferenceRun(Worker):
    def __init__(self, spec: TrialSpec, torch: ModuleType) -> None:
        super().__init__(spec, torch)
        self.losses: list[float] = []
        self.gradients: list[list[float]] = []
        self.answered = False
        self.first_step_s = 0.0
        self.has_launcher = "RANK" in os.environ  # not by the script itself, which starts later
        self.perturbed: weakref.WeakSet[Any] = weakref.WeakSet()

    def attach(self) -> None:
        """Attach on one device per process, because ranks run at the same time."""
        one_device(self.torch, self.ledger)
        super().attach()

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        weight_ulps = self.spec.requested.get("weight_ulps", 0.0)
        if weight_ulps and root not in self.perturbed:
            self.perturbed.add(root)
            for p in root.parameters():
                if p.is_floating_point():
                    perturb_weights([p], weight_ulps * self.torch.finfo(p.dtype).eps, self.torch)

    def backward_begin(self, losses: tuple[Any, ...]) -> None:
        self.pending_losses = losses

    def backward_end(self) -> None:
        self.losses.append(sum(float(loss.detach().double().mean()) for loss in self.pending_losses))
        self.pending_losses = ()
        if (
            not self.context.steps
            and (self.context.closure_steps or not self.context.optimizers)
            and not any(self.gradients)
        ):
            self._sketch()
        if not self.context.steps and len(self.losses) >= MAX_PASSES and self.context.closure_steps:
            self._send_results()

    def optimizer_begin(self, optimizer: Optimizer) -> None:
        if not self.context.steps and not self.gradients:
            self._sketch()

    def step_end(self) -> None:
        if self.stopping:
            os._exit(0)  # the program swallowed StopTrial
        timed_out = (
            self.context.steps > 1
            and self.first_step_s
            and seconds() - self.first_step_s > self.spec.requested.get("seconds", 1e9)
        )
        self.first_step_s = self.first_step_s or seconds()
        if self.context.steps >= self.spec.requested.get("steps", STEPS) or timed_out:
            self._send_results()

    def _own_ranks(self) -> str:
        """How the program created its own training processes; empty if it did not.

        A lever of flatout hides the ranks that flatout created.
        """
        distributed = self.torch.distributed
        in_group = distributed.is_available() and distributed.is_initialized()
        if in_group and self.has_launcher:
            return BY_LAUNCHER
        if multiprocessing.parent_process() is not None:
            return IN_CHILDREN
        return BY_GROUP if in_group else ""

    def _state_bytes(self) -> dict[str, int]:
        """The bytes of weights, gradients and optimizer state, in full even if ranks hold shards."""
        context, tensor = self.context, self.torch.Tensor
        weights = {id(p): p for root in context.roots for p in (*root.parameters(), *root.buffers())} | {
            id(p): p for p in context.parameters
        }
        state = [
            value
            for optimizer in context.optimizers
            for values in optimizer.state.values()
            if isinstance(values, dict)
            for value in values.values()
        ]
        return {
            "weights": _bytes(weights.values()),
            "gradients": _bytes(p for p in weights.values() if p.requires_grad),
            "optimizer state": _bytes(value for value in state if isinstance(value, tensor)),
        }

    def _sketch(self) -> None:
        self.gradients = [sketch(self.torch, p.grad) for p in self.context.parameters]

    def _send_results(self) -> None:
        if self.claimed is None:
            self._claim()
        if not self.claimed or self.answered:
            return
        self.answered = True
        context = self.context
        self.send(
            {
                "ticks": 0,
                "losses": [loss.hex() for loss in self.losses],
                "gradients": self.gradients,
                "steps": context.steps,
                "training_loaders": context.training_loader_numbers,
                "loaders": context.loaders,
                "context": context.describe(),
                "own_ranks": self._own_ranks(),
                "state_bytes": self._state_bytes(),
                "device": context.device_type,
                "applied": [o.to_json() for o in self.applier.outcomes if o.applied],
                "skipped": [o.to_json() for o in self.applier.outcomes if not o.applied],
            }
        )
        while True:
            command = self.next_command()
            if command["do"] == "finish":
                finish(self)
            self.send({"error": f"unknown command {command['do']!r}"})


def _bytes(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def sketch(torch: ModuleType, gradient: Tensor) -> list[float]:
    """Return ``SKETCH_SUMS`` sums over a gradient, or all of a small one; empty without a gradient."""
    if gradient is None:
        return []
    if hasattr(gradient, "full_tensor"):  # of a sharded weight
        gradient = gradient.full_tensor()
    flat = gradient.detach().to_dense().double().reshape(-1)
    if flat.numel() <= SKETCH_SUMS:
        return list(map(float, flat.tolist()))
    padded = torch.cat([flat, flat.new_zeros(-flat.numel() % SKETCH_SUMS)])
    return list(map(float, padded.view(-1, SKETCH_SUMS).sum(0).tolist()))
