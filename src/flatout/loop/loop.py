"""The training loop as an object: iterate over it, and each item is one optimizer step.

    for step in flatout.Loop(model, optimizer, loss_fn, loader, epochs=3):
        if step.index % 100 == 0:
            print(step.index, float(step.loss))

An effective batch is one or more batches of the loader. Each batch is split into one or more micro-batches.
One step runs:

    zero_grad, for each micro-batch: forward, loss, backward; clip; optimizer.step; scheduler.step

The gradient equals that of the whole effective batch (`flatout.loop.accumulation` checks that such a gradient
exists). A step of one micro-batch is bitwise identical to a plain PyTorch loop. If memory runs out, the Loop
repeats the step from its start in smaller micro-batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from flatout.agent.applier import AFTER_FIRST_STEP, BEFORE_FIRST_STEP, Applier, Outcome, one_line
from flatout.agent.ledger import Ledger
from flatout.agent.listener import Listener
from flatout.agent.training_context import TrainingContext
from flatout.guard.captured_steps import needs_closure
from flatout.job.plan_file import read_plan
from flatout.levers import TABLE, checked
from flatout.loop.batches import windows
from flatout.loop.gradient import Gradient, LossMonitor, Training
from flatout.loop.loop_state import LoopState, check_not_sharded
from flatout.loop.memory import MicroBatches
from flatout.loop.precision import Precision
from flatout.loop.rank_group import rank_group_of, ranks_of
from flatout.loop.saving import LoopCheckpointing, Resumed, is_trial_process, open_checkpoints
from flatout.loop.settings import AUTO, LoopSettings
from flatout.loop.sizing import Sized, Sizer
from flatout.loop.step import Rate, Step
from flatout.loop.update import Update
from flatout.measure.clock import seconds
from flatout.probe.machine import look
from flatout.schema.enums import Moment
from flatout.schema.errors import LoopError
from flatout.schema.plan import Plan

if TYPE_CHECKING:
    from torch.nn import Module
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader


LOGGER = logging.getLogger("flatout")
PROCESS_LEVER = "it acts before the program starts: run `flatout run python train.py` with this plan"


def plan_of(source: object) -> Plan:
    """A Plan, from a Plan or the path of one. Raises LoopError, PlanError."""
    if source is None:
        return Plan()
    if isinstance(source, Plan):
        return checked(source)
    if isinstance(source, (str, Path)):
        return checked(read_plan(Path(source)), source)
    raise LoopError(
        f"plan is a {type(source).__name__}. Pass a flatout.Plan, the path of a flatout.toml, or None."
    )


class Levers:
    """Applies a Plan at two moments: before the first batch, and after the first step.

    The first step runs without the late levers."""

    def __init__(
        self,
        torch: ModuleType,
        plan: Plan,
        model: Module,
        optimizer: Optimizer,
        loss_fn: Callable[..., Any],
        loader: DataLoader,
    ) -> None:
        self.plan = plan
        self.outcomes: list[Outcome] = []
        self._ledger = Ledger()
        self.context = TrainingContext(torch, Listener(), self._ledger)
        self.context.register_objects(
            [model], [optimizer], [loader], [loss_fn] if isinstance(loss_fn, torch.nn.Module) else []
        )
        self.applier = Applier(TABLE, look(), self.context)

    def apply_early(self, loader: DataLoader) -> Any:
        """Apply the early levers and return the loader to iterate over."""
        self.outcomes = [
            Outcome(choice, False, PROCESS_LEVER)
            for choice in self.plan
            if (lever := self.applier.lever(choice)) is not None and lever.moment is Moment.PROCESS
        ]
        self.applier.start(self.plan, BEFORE_FIRST_STEP)
        return self.context.rebuild_loader(loader, self._ledger)

    def apply_late(self, backward_passes: int) -> None:
        self.context.first_step_done(backward_passes)
        self.applier.start(self.plan, AFTER_FIRST_STEP)
        self.outcomes += self.applier.outcomes
        LOGGER.info(one_line(self.outcomes))
        for outcome in self.outcomes:
            if not outcome.applied:
                LOGGER.warning("%s is not applied: %s", outcome.choice.name, outcome.reason)

    def undo(self) -> None:
        """Undo all levers that act while the program runs."""
        self.applier.switch(())
        self._ledger.restore()


class Loop:
    """Trains ``model`` on the batches of ``loader``. Iterate over it: each item is one optimizer step.

        loop = flatout.Loop(model, optimizer, loss_fn, loader, epochs=3, effective_batch=512, clip=1.0)
        for step in loop:
            if step.index % 100 == 0:
                print(step.index, float(step.loss), step.samples_per_s)

    Args:
        model: The ``nn.Module`` to train, already on its device.
        optimizer: A ``torch.optim`` optimizer of the model's parameters.
        loss_fn: ``loss_fn(model, batch)`` returns the loss, a scalar tensor: a mean or a sum over the samples
            of the batch. If it is a mean over something else (tokens, pixels), return ``(loss, n)`` with that
            number; ``n`` must not be 0 if it is a tensor on a device. You may append a dict of further
            scalars to either form: they become ``step.metrics``.
        loader: An iterable of batches, iterated once per epoch: a DataLoader or a list, for example. A batch
            is a nested tuple, list, mapping or dataclass of tensors of shape ``(samples, ...)``. The Loop
            moves it to the model's device.
        plan: A `flatout.Plan` or the path of a ``flatout.toml``. The Loop applies its levers to these
            objects; ``loop.outcomes`` lists which are active, and why others are not. `flatout tune` finds
            a plan.
        epochs: How many times to iterate over the loader.
        steps: Stop after this many optimizer steps, even within an epoch.
        effective_batch: Samples per optimizer step, a multiple of the loader's batch. Default: the loader's
            batch.
        micro_batch: Maximum number of samples per forward and backward pass. Default: the loader's batch, or
            less after it did not fit into memory. ``"auto"`` finds the fastest size that fits in the first
            steps; all of these steps count as training.
        reduction: ``"mean"`` or ``"sum"``, if ``loss_fn`` cannot be tested. Default: the Loop tests it when
            it splits the first batch.
        scheduler: A learning-rate scheduler. The Loop calls ``scheduler.step()`` after each optimizer step.
        clip: Maximum norm of the gradient.
        precision: ``"float32"`` (the dtype of the model), ``"tf32"``, ``"bf16"`` or ``"fp16"`` (autocast;
            fp16 with a gradient scaler).
        metrics: How to combine the further scalars of micro-batches, as ``{name: how}``: ``"mean"`` (weighted
            by samples, the default), ``"sum"``, ``"max"``, ``"min"`` or ``"last"``.
        on_nan: ``"stop"`` ends the loop at a NaN or infinite loss and names the module that produced it.
            ``"ignore"`` continues. With fp16, a skipped step does not stop the loop.
        allow_inexact: Split batches even if this changes the gradient (batch normalisation, losses between
            samples).
        checkpoint_dir: A folder for the checkpoints of this training. The program, started again, resumes from the
            newest valid one, bitwise identical to an uninterrupted run; ``loop.resumed`` describes it. On
            SIGTERM, SIGINT, SIGHUP or SIGUSR1, the program finishes the current step, writes a checkpoint and
            ends.
        save_every: Steps between two checkpoints. With 1, each step waits for its checkpoint, so no step is
            ever lost. Default: as often as 1 % of the time allows.
        extra_state: Further objects to store in checkpoints, as ``{name: object}``. Each needs ``state_dict`` and
            ``load_state_dict``: an average of the weights, for example.
        from_scratch: Start from scratch. Existing checkpoints move to a subfolder.
        on_drift: If torch, threads, devices, the script or the data differ from the checkpoint: ``"warn"``
            reports it and claims no exactness, ``"stop"`` raises LoopError.

    Raises:
        LoopError: This training is not possible as requested. Exceptions of your own code pass through.
        PlanError: ``plan`` is not a valid plan.
        CheckpointError: ``checkpoint_dir`` contains checkpoints, but none is valid, or it does not fit this training.
        StorageError: The folder ``checkpoint_dir`` cannot be written, or another process writes to it."""

    def __init__(
        self,
        model: Module,
        optimizer: Optimizer,
        loss_fn: Callable[[Any, Any], Any],
        loader: Iterable[Any],
        *,
        plan: Plan | str | Path | None = None,
        epochs: int = 1,
        steps: int | None = None,
        effective_batch: int | None = None,
        micro_batch: int | Literal["auto"] | None = None,
        reduction: str | None = None,
        scheduler: Any = None,
        clip: float | None = None,
        precision: str = "float32",
        metrics: Mapping[str, str] | None = None,
        on_nan: str = "stop",
        allow_inexact: bool = False,
        checkpoint_dir: str | Path | None = None,
        save_every: int | None = None,
        extra_state: Mapping[str, Any] | None = None,
        from_scratch: bool = False,
        on_drift: str = "warn",
    ) -> None:
        import torch

        settings = LoopSettings(
            plan=plan,
            epochs=epochs,
            steps=steps,
            effective_batch=effective_batch,
            micro_batch=micro_batch,
            reduction=reduction,
            scheduler=scheduler,
            clip=clip,
            precision=precision,
            metrics=dict(metrics or {}),
            on_nan=on_nan,
            allow_inexact=allow_inexact,
            checkpoint_dir=checkpoint_dir,
            save_every=save_every,
            extra_state=extra_state or {},
            from_scratch=from_scratch,
            on_drift=on_drift,
        )
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
        self._step_sets_up = self._is_setting_up()

    def close(self) -> None:
        """Restore the model, the optimizer, the loader and torch's flags where possible.

        The Loop stays usable, without the levers and the precision setting. It closes its checkpoint folder
        as well."""
        if self._levers is not None:
            self._levers.undo()
        self.precision.close()
        if self._saving is not None:
            self._saving.close()

    @property
    def sizing(self) -> bool:
        """Whether the Loop is still trying sizes of micro-batches."""
        return self._sizer is not None and self._sizer.result is None

    def _is_setting_up(self) -> bool:
        return self._pending_levers is not None or self.sizing

    def __iter__(self) -> Iterator[Step]:
        saving = self._saving
        if saving is None:
            yield from self._epochs(self.index, self.epoch)
            return
        try:
            yield from self._epochs(*saving.begin())
            saving.finish()
        finally:
            saving.close()

    def _epochs(self, first: int, first_epoch: int) -> Iterator[Step]:
        saving = self._saving
        while self.epoch - first_epoch < self.epochs and (
            self.steps is None or self.index - first < self.steps
        ):
            length = _length(self.loader)
            batch_count = saving.consumed_batches if saving is not None else 0
            for window in windows(self.loader if saving is None else saving.batches(), self.effective_batch):
                batch_count += len(window)
                yield self._step(window, None if length is None else batch_count >= length)
                if self.steps is not None and self.index - first >= self.steps:
                    return
                if saving is not None:
                    saving.between_steps()
            if not batch_count:
                raise LoopError(
                    "the loader gave no batch. An iterator can be used only once: pass the loader itself, not iter(loader)."
                )
            self.epoch += 1
            if saving is not None:
                saving.position.end_epoch()

    def __repr__(self) -> str:
        total = f" of {self.steps}" if self.steps is not None else ""
        status = ", sizing micro-batches" if self.sizing else ""
        names = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        return f"Loop({names}, {self.index} steps done{total}, epoch {self.epoch}, {self.plan.describe()}{status})"

    def _repr_html_(self) -> str:
        length = _length(self.loader) if self.effective_batch is None else None
        all_epochs = self.epochs * length if length is not None else None
        limits = [steps for steps in (self.steps, all_epochs) if steps is not None]
        from flatout.render.formatting import per_second
        from flatout.render.page import loop_html

        facts = [("epochs done", f"{self.epoch} of {self.epochs}"), ("plan", self.plan.describe())]
        if (samples_per_s := self._rate.samples_per_s()) is not None:
            facts.insert(0, ("throughput", per_second(samples_per_s)))
        if self.sizing:
            facts.append(("now", "sizing micro-batches"))
        if self.sized is not None:
            facts.append(("micro-batches", self.sized.sentence()))
        title = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        levers = [(o.choice.text, "active" if o.applied else "not active", o.reason) for o in self.outcomes]
        return loop_html(title, self.index, min(limits, default=None), facts, levers)

    @property
    def outcomes(self) -> list[Outcome]:
        """For each choice of the plan: whether it is applied, or the reason why not.

        Complete after the first step."""
        return self._levers.outcomes if self._levers is not None else []

    @property
    def sized(self) -> Sized | None:
        """With ``micro_batch="auto"``: the chosen size and the time of each size in ms.

        None until sizing ends."""
        return self._sizer.result if self._sizer is not None else None

    # -- its parts

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
        if settings.checkpoint_dir is None or is_trial_process():
            return None
        check_not_sharded(self.model)
        group = rank_group_of(self.torch, self.model)
        folder = open_checkpoints(Path(settings.checkpoint_dir), settings.from_scratch, group)
        return LoopCheckpointing(self.torch, folder, settings.save_every, settings.on_drift, group)

    def _plan_levers(self, plan: Plan) -> None:
        self.plan = plan
        self._levers = None
        if plan.choices:
            self._levers = Levers(self.torch, plan, self.model, self.optimizer, self.loss_fn, self.loader)
        self._pending_levers = self._levers  # until the first step is done
        if self._pending_levers is not None:
            self.loader = self._pending_levers.apply_early(self.loader)

    def _resume(self, saving: LoopCheckpointing) -> Resumed | None:
        loop_state = LoopState(self, self._gradient, self._update, self._sizer, self._settings.extra_state)
        return saving.attach(self, loop_state, self._settings.drift_settings(self.model, self.optimizer))

    # -- one step

    def _step(self, window: list[tuple[Any, int]], ends_epoch: bool | None) -> Step:
        samples = window[0][1] if len(window) == 1 else sum(size for _, size in window)
        lr = self.optimizer.param_groups[0]["lr"]
        end_setup = self._begin_setup(window) if self._step_sets_up else None
        loss, parts, values = self._gradient.compute(self.index, window, samples)
        grad_norm = self._update.clip_gradient() if self.clip is not None else None
        skipped = self._update.step(self.index)
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        step = Step(
            self.index,
            self.epoch,
            loss,
            lr,
            samples,
            parts,
            grad_norm,
            values,
            skipped,
            ends_epoch,
            self._rate,
        )
        if end_setup is not None:
            end_setup(parts)
        self.index += 1
        self._rate.step(seconds(), samples)
        return step

    def _begin_setup(self, window: list[tuple[Any, int]]) -> Callable[[int], None]:
        sizer = self._sizer if self.sizing else None
        if sizer is not None:
            self._gradient.detect_reduction(window)
            sizer.step_begins(max(size for _, size in window))

        def end_setup(parts: int) -> None:
            if sizer is not None:
                sizer.step_ends()
            if self._pending_levers is not None:
                self._pending_levers.apply_late(parts)
                self._pending_levers = None
            self._step_sets_up = self._is_setting_up()

        return end_setup


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
    parameters = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not parameters:
        raise LoopError(
            "no parameter of the optimizer requires a gradient, so there is nothing to train. Set requires_grad=True."
        )
    return list(parameters.values())


def _length(loader: DataLoader) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


__all__ = ["Loop", "Step"]
