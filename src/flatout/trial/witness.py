"""A trial that tells what the first steps of a program computed, so that two ways of running it can be laid side by side.

It trains a few steps and stops. Its answer: the loss of every backward pass, and of the gradients with which the first optimizer step begins (after
clipping) a sketch, ``SKETCH`` sums a parameter: everything that is linear in the gradient shows there, and it travels as JSON. ``shake`` moves every
weight by up to so many units of its last place before it is first used: how far does the program carry rounding?
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from flatout.engine.replay import shake
from flatout.trial.spec import TrialSpec
from flatout.trial.worker import Worker

ENTRY = "flatout.trial.witness:attach"
SKETCH = 64
STEPS = 4
PASSES = 24  # of a program whose one step is a closure of many passes


def attach(job: dict[str, Any]) -> None:
    """The entry that the bootstrap calls right after ``import torch``."""
    import torch

    Witness(TrialSpec.from_json(job), torch).attach()


class Witness(Worker):
    def __init__(self, spec: TrialSpec, torch: Any) -> None:
        super().__init__(spec, torch)
        self.open_losses: tuple[Any, ...] = ()
        self.losses: list[float] = []
        self.gradients: list[list[float]] = []
        self.told = False
        self.shaken: weakref.WeakSet[Any] = weakref.WeakSet()

    def forward_begin(self, root: Any, args: tuple, kwargs: dict) -> None:
        if self.spec.shake and root not in self.shaken:
            self.shaken.add(root)
            for p in root.parameters():
                if p.is_floating_point():
                    shake([p], self.spec.shake * self.torch.finfo(p.dtype).eps, self.torch)

    def backward_begin(self, losses: tuple) -> None:
        self.open_losses = losses

    def backward_end(self) -> None:
        self.losses.append(sum(float(loss.detach().double().mean()) for loss in self.open_losses))
        self.open_losses = ()
        if not self.scene.steps and not self.scene.optimizers:
            self._sketch()
        if len(self.losses) >= PASSES and self.scene.closure_steps:
            self._tell()

    def optimizer_begin(self, optimizer: Any) -> None:
        """Where ``step`` takes a closure that computes them, there are no gradients yet."""
        if not self.scene.steps and not self.gradients:
            self._sketch()

    def optimizer_end(self, optimizer: Any) -> None:
        if not self.scene.steps and not any(self.gradients):
            self._sketch()

    def _lead_astray(self, optimizer: Any) -> None:
        """Each gradient off by ``shake`` of its length, as rounding might have it; the same for every run, and no draw of the program's."""
        torch, draw = self.torch, self.torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.grad.layout == torch.strided):
                noise = torch.randn(p.grad.shape, generator=draw).to(p.grad.device, p.grad.dtype)
                p.grad.add_(noise * (self.spec.shake * p.grad.norm() / max(1.0, p.grad.numel() ** 0.5)))

    def step_end(self) -> None:
        if self.stopping:
            os._exit(0)  # the stop was swallowed somewhere
        if self.scene.steps >= STEPS:
            self._tell()

    def _divides_itself(self) -> bool:
        """Whether the script has made ranks of its own. A lever of ours hides those that it made."""
        distributed = self.torch.distributed
        return bool(distributed.is_available() and distributed.is_initialized())

    def _sketch(self) -> None:
        self.gradients = [sketched(self.torch, p.grad) for p in self.scene.parameters]

    def _tell(self) -> None:
        if self.claimed is None:
            self._claim()
        if not self.claimed or self.told:
            return
        self.told = True
        scene = self.scene
        loaders = scene.loaders
        self._answer({"ticks": 0, "losses": [loss.hex() for loss in self.losses], "gradients": self.gradients, "steps": scene.steps,
                      "fed": scene.loaders_that_train, "loaders": loaders, "scene": scene.describe(),
                      "divides_itself": self._divides_itself(), "applied": [o.to_json() for o in self.applier.outcomes if o.applied],
                      "skipped": [o.to_json() for o in self.applier.outcomes if not o.applied]})
        while True:
            command = self._next_command()
            if command["do"] == "finish":
                self._finish(draws=False)
            self._answer({"error": f"unknown command {command['do']!r}"})


def sketched(torch: Any, gradient: Any) -> list[float]:
    """``SKETCH`` sums over a gradient, or all of it where it is small; empty where there is none."""
    if gradient is None:
        return []
    flat = gradient.detach().to_dense().double().reshape(-1) if gradient.layout != torch.strided else gradient.detach().double().reshape(-1)
    if flat.numel() <= SKETCH:
        return list(map(float, flat.tolist()))
    rest = -flat.numel() % SKETCH
    padded = torch.cat([flat, flat.new_zeros(rest)]) if rest else flat
    return list(map(float, padded.view(-1, SKETCH).sum(0).tolist()))
