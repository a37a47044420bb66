"""Puts a Loop together from its settings, and takes it apart again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.guard.captured_steps import needs_closure
from flatout.loop.finite import LossMonitor
from flatout.loop.gradient import Gradient
from flatout.loop.levers import Levers, plan_of
from flatout.loop.loop_state import LoopState, storable
from flatout.loop.memory import MicroBatches
from flatout.loop.precision import Precision
from flatout.loop.rank_group import rank_group_of, ranks_of
from flatout.loop.resuming import Resumed, measured, opened
from flatout.loop.saving import LoopCheckpointing
from flatout.loop.settings import AUTO, LoopSettings
from flatout.loop.sizing import Sizer
from flatout.loop.step import Rate
from flatout.loop.training import Training
from flatout.loop.update import Update
from flatout.schema.errors import LoopError
from flatout.schema.plan import Plan

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer


class LoopAssembly:
    """The parts of a Loop: precision, micro-batches, gradient, update, levers, checkpoints."""

    def _assemble(
        self,
        model: Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Any],
        loader: Iterable[Any],
        settings: LoopSettings,
    ) -> None:
        import torch

        self.torch, self._settings = torch, settings
        self.model, self.optimizer, self.loss_fn, self.loader = model, optimizer, loss_fn, loader
        self.epochs, self.steps = settings.epochs, settings.steps
        self.effective_batch = settings.effective_batch
        self.scheduler, self.clip, self.metrics = settings.scheduler, settings.clip, settings.metrics
        self.parameters = _parameters(optimizer)
        self.device = self.parameters[0].device
        plan = plan_of(settings.plan)
        self._make_training()
        self._saving = self._open_checkpoints()
        self._plan_levers(plan)
        self.index = 0
        self.epoch = 0
        self._rate = Rate()
        self.resumed: Resumed | None = None
        if self._saving is not None:
            self.resumed = self._resume(self._saving)
        self._extras = self._around_a_step()

    def _make_training(self) -> None:
        torch, settings, model = self.torch, self._settings, self.model
        ranks = len(ranks_of(torch, model)) or 1
        if ranks > 1 and settings.micro_batch == AUTO:
            raise LoopError(
                'micro_batch="auto" tries sizes that may not fit, and with several ranks a step cannot be repeated. Find the size in one '
                "process (loop.sized), and pass it here: micro_batch=16, for example."
            )
        parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self.precision = Precision(torch, settings.precision, self.device, self.parameters)
        training = Training(
            torch,
            model,
            model.module if parallel else model,
            self.optimizer,
            self.loss_fn,
            self.parameters,
            self.device,
            self.precision,
            ranks,
        )
        self.micro_batches = MicroBatches(settings.largest_micro_batch)
        self._sizer = Sizer(torch, self.device, self.micro_batches) if settings.micro_batch == AUTO else None
        stops = settings.on_nan == "stop" and self.precision.scaler is None
        self._gradient = Gradient(
            training,
            self.micro_batches,
            self.metrics,
            settings.reduction,
            settings.allow_inexact,
            LossMonitor(torch, self.device) if stops else None,
        )
        self._update = Update(training, settings.clip)

    def _open_checkpoints(self) -> LoopCheckpointing | None:
        settings = self._settings
        if settings.checkpoint_dir is None or measured():
            return None
        storable(self.model)
        group = rank_group_of(self.torch, self.model)
        folder = opened(Path(settings.checkpoint_dir), settings.from_scratch, group)
        return LoopCheckpointing(self.torch, folder, settings.save_every, settings.on_drift, group)

    def _plan_levers(self, plan: Plan) -> None:
        self.plan = plan
        self._levers = (
            Levers(self.torch, plan, self.model, self.optimizer, self.loss_fn, self.loader)
            if plan.choices
            else None
        )
        self._late = self._levers  # until the first step is done
        if self._late is not None:
            self.loader = self._late.early(self.loader)

    def _resume(self, saving: LoopCheckpointing) -> Resumed | None:
        kept = LoopState(self, self._gradient, self._update, self._sizer, self._settings.extra_state)
        return saving.attach(self, kept, self._settings.for_drift(self.model, self.optimizer))

    def close(self) -> None:
        """Restore the model, the optimizer, the loader and torch's flags where possible.

        The Loop stays usable, without the levers and the precision setting. It closes its checkpoint folder
        as well.
        """
        if self._levers is not None:
            self._levers.take_off()
        self.precision.close()
        if self._saving is not None:
            self._saving.leave()

    @property
    def sizing(self) -> bool:
        """Whether the Loop is still trying sizes of micro-batches."""
        return self._sizer is not None and self._sizer.found is None

    def _around_a_step(self) -> bool:
        return self._late is not None or self.sizing


def _parameters(optimizer: Optimizer) -> list[Any]:
    if not hasattr(optimizer, "param_groups"):
        raise LoopError(
            f"optimizer is a {type(optimizer).__name__}. Pass a torch.optim optimizer, made from model.parameters()."
        )
    if needs_closure(optimizer):
        raise LoopError(
            f"{type(optimizer).__name__} runs forward and backward several times per step, which a Loop does not support. Call "
            "optimizer.step(closure) in your own loop."
        )
    found = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not found:
        raise LoopError(
            "no parameter of the optimizer requires a gradient, so there is nothing to train. Set requires_grad=True."
        )
    return list(found.values())
