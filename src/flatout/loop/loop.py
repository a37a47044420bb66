"""The training loop as an object: iterate over it, and each item is one optimizer step.

    for step in flatout.Loop(model, optimizer, loss_fn, loader, epochs=3):
        if step.index % 100 == 0:
            print(step.index, float(step.loss))

An effective batch is one or more batches of the loader. Each batch is split into one or more micro-batches.
One step runs:

    zero_grad, for each micro-batch: forward, loss, backward; clip; optimizer.step; scheduler.step

The gradient equals that of the whole effective batch (`flatout.loop.reduction` checks that such a gradient
exists). A step of one micro-batch is bitwise identical to a plain PyTorch loop. If memory runs out, the Loop
repeats the step from its start in smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from flatout.engine.applier import Outcome
from flatout.engine.replay import needs_closure
from flatout.loop.accumulation import HOW
from flatout.loop.autoplan import Autoplan, effects_of
from flatout.loop.finite import LossMonitor
from flatout.loop.gradient import Gradient
from flatout.loop.levers import Levers, plan_of
from flatout.loop.loop_state import LoopState, storable
from flatout.loop.memory import MicroBatches
from flatout.loop.opened import measured, opened
from flatout.loop.pipeline_parallel import Pipeline, PipelineParallel
from flatout.loop.precision import Precision
from flatout.loop.rank_group import company_of
from flatout.loop.ranks import ranks_of
from flatout.loop.reduction import MEAN, SUM
from flatout.loop.resumed import Resumed
from flatout.loop.saving import LoopCheckpointing
from flatout.loop.sizing import Sized, Sizer
from flatout.loop.step import Rate, Step
from flatout.loop.tensor_parallel import TensorParallel, refused
from flatout.loop.training import Training
from flatout.loop.tuning import Tuned
from flatout.loop.update import Update
from flatout.loop.windows import windows
from flatout.measure.clock import seconds
from flatout.plan.enums import Effect
from flatout.plan.errors import LoopError
from flatout.plan.plan import Plan

AUTO = "auto"


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
            objects; ``loop.outcomes`` lists which are active, and why others are not. ``"auto"`` tries levers
            in the first steps; all of these steps count as training. Read the result in ``loop.tuned`` and
            ``loop.plan``.
        effects: What ``plan="auto"`` may change: ``"exact"`` (no bit), ``"rounding"`` (the same maths,
            rounded differently) or ``"precision"`` (also products in half precision). Default:
            ``"precision"``.
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
            fp16 with a gradient scaler), ``"fp8"`` (torchao), ``"bf16-master"`` or ``"fp16-master"`` (a model
            in that dtype, and an optimizer with float32 copies of its parameters).
        metrics: How to combine the further scalars of micro-batches, as ``{name: how}``: ``"mean"`` (weighted
            by samples, the default), ``"sum"``, ``"max"``, ``"min"`` or ``"last"``.
        on_nan: ``"stop"`` ends the loop at a NaN or infinite loss and names the module that produced it.
            ``"ignore"`` continues. With fp16, a skipped step does not stop the loop.
        parallel: ``{module name: style}`` with the styles of ``torch.distributed.tensor.parallel``, such as
            ``ColwiseParallel()``. These layers are sharded over the ranks, which all get the same batches,
            and the optimizer holds the sharded parameters from then on. Or a `flatout.Pipeline`: each rank
            has one stage.
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
        SaveError: ``checkpoint_dir`` contains checkpoints, but none is valid, or it does not fit this training.
        StorageError: The folder ``checkpoint_dir`` cannot be written, or another process writes to it.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loss_fn: Callable[[Any, Any], Any],
        loader: Iterable[Any],
        *,
        plan: Plan | str | Path | None = None,
        effects: str | None = None,
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
        parallel: Mapping[str, Any] | Pipeline | None = None,
        allow_inexact: bool = False,
        checkpoint_dir: str | Path | None = None,
        save_every: int | None = None,
        extra_state: Mapping[str, Any] | None = None,
        from_scratch: bool = False,
        on_drift: str = "warn",
    ) -> None:
        import torch

        self.torch = torch
        self.model, self.optimizer, self.loss_fn, self.loader, self.scheduler = (
            model,
            optimizer,
            loss_fn,
            loader,
            scheduler,
        )
        self.parameters = _parameters(optimizer)
        self.device = self.parameters[0].device
        divided: TensorParallel | PipelineParallel | None = None
        if parallel is not None:
            refused(
                plan=(plan, (None,)),
                micro_batch=(micro_batch if micro_batch == "auto" else None, (None,)),
                precision=(precision, ("float32", "tf32")),
                model=(
                    type(model).__name__,
                    {type(model).__name__} - {"DistributedDataParallel", "DataParallel"},
                ),
            )
            divided = (
                PipelineParallel(torch, model, optimizer, parallel, self.device, reduction, on_nan == "stop")
                if isinstance(parallel, Pipeline)
                else TensorParallel(torch, model, optimizer, parallel, self.device)
            )
            self.parameters = _parameters(optimizer)
        self.epochs, self.steps, self.effective_batch = (
            _positive("epochs", epochs),
            _positive("steps", steps),
            _positive("effective_batch", effective_batch),
        )
        self.clip, self.metrics = clip, dict(metrics or {})
        if clip is not None and not clip > 0:
            raise LoopError(
                f"clip={clip!r} is not positive and would stop all training. Give the maximum norm of the gradient, or remove clip."
            )
        if reduction not in (None, MEAN, SUM):
            raise LoopError(f'reduction={reduction!r} is not supported. Use "mean", "sum" or None.')
        if strange := {name: how for name, how in self.metrics.items() if how not in HOW}:
            raise LoopError(
                f"metrics={strange!r} is not supported. Combine the values of micro-batches with one of {', '.join(HOW)}."
            )
        if on_nan not in ("stop", "ignore"):
            raise LoopError(f'on_nan={on_nan!r} is not supported. Use "stop" or "ignore".')
        if on_drift not in ("warn", "stop"):
            raise LoopError(f'on_drift={on_drift!r} is not supported. Use "warn" or "stop".')
        if checkpoint_dir is None and (save_every is not None or extra_state or from_scratch):
            raise LoopError(
                'save_every=, extra_state= and from_scratch= need a folder for checkpoints. Name one: checkpoint_dir="checkpoints".'
            )
        every, plan = _positive("save_every", save_every), plan if plan == AUTO else plan_of(plan)
        if strange := {
            name: type(thing).__name__
            for name, thing in (extra_state or {}).items()
            if not hasattr(thing, "load_state_dict")
        }:
            raise LoopError(
                f"extra_state={strange!r} cannot be stored. Each object needs state_dict and load_state_dict."
            )
        self._ranks = ranks_of(torch, model) if divided is None else None
        rejoin = self._ranks.rejoin if self._ranks is not None else None
        self.precision = Precision(
            torch, precision, model, optimizer, self.device, self.parameters, rejoin is not None
        )
        training = Training(
            torch,
            model,
            model.module if rejoin is not None else model,
            optimizer,
            loss_fn,
            self.parameters,
            self.device,
            self.precision,
            self._ranks,
            divided,
        )
        self.micro_batches = MicroBatches(
            None if micro_batch == "auto" else _positive("micro_batch", micro_batch)
        )
        agreed = self._ranks.slowest if self._ranks is not None else list
        self._sizer = Sizer(torch, self.device, self.micro_batches, agreed) if micro_batch == "auto" else None
        watch = (
            LossMonitor(torch, self.device) if on_nan == "stop" and self.precision.scaler is None else None
        )
        self._gradient = Gradient(training, self.micro_batches, self.metrics, reduction, allow_inexact, watch)
        self._update = Update(training, clip)
        self._saving: LoopCheckpointing | None = None
        if checkpoint_dir is not None and not measured():
            storable(model)
            company = company_of(torch, model)
            self._saving = LoopCheckpointing(
                torch, opened(Path(checkpoint_dir), from_scratch, company), every, on_drift, company
            )
        if plan == AUTO and self._saving is not None and self._saving.plan is not None:
            plan, effects = Plan.from_toml(self._saving.plan), None  # the earlier run has tuned already
        self._plan = plan if isinstance(plan, Plan) else Plan()
        self._levers = (
            Levers(torch, self._plan, model, optimizer, loss_fn, loader)
            if plan == AUTO or self._plan.choices
            else None
        )
        self._autoplan = self._tuned_by(effects) if plan == AUTO else None
        if effects is not None and self._autoplan is None:
            raise LoopError(
                f'effects={effects!r} applies only to plan="auto". Remove effects, or use plan="auto".'
            )
        self._late = self._levers if self._plan.choices else None  # until the first step is done
        if self._late is not None:
            self.loader = self._late.early(loader)
        self.index = 0
        self.epoch = 0
        self._rate = Rate()
        self.resumed: Resumed | None = None
        if self._saving is not None:
            settings = {
                "model": type(getattr(model, "module", model)).__name__,
                "optimizer": type(optimizer).__name__,
                "scheduler": type(scheduler).__name__,
                "precision": precision,
                "clip": clip,
                "effective batch": effective_batch,
                "micro-batch": micro_batch,
                "parallel": _spelled(parallel),
            }
            kept = LoopState(
                self,
                self._gradient,
                self._update,
                self._sizer,
                extra_state or {},
                divided.stage if isinstance(divided, PipelineParallel) else None,
            )
            self.resumed = self._saving.attach(self, kept, settings, shares_out=divided is None)
        self._extras = self._around_a_step()

    def __iter__(self) -> Iterator[Step]:
        saving = self._saving
        if saving is None:
            yield from self._epochs(self.index, self.epoch)
            return
        try:
            yield from self._epochs(*saving.begin())
            saving.finish()
        finally:
            saving.leave()

    def _epochs(self, first: int, first_epoch: int) -> Iterator[Step]:
        """Yield steps, counted from the step at which this training began: ``index`` of them are done."""
        saving = self._saving
        while self.epoch - first_epoch < self.epochs and (
            self.steps is None or self.index - first < self.steps
        ):
            length = _length(self.loader)
            seen = saving.given if saving is not None else 0
            for window in windows(self.loader if saving is None else saving.batches(), self.effective_batch):
                seen += len(window)
                yield self._step(window, None if length is None else seen >= length)
                if self.steps is not None and self.index - first >= self.steps:
                    self.settle()
                    return
                if saving is not None:
                    saving.edge()
            if not seen:
                raise LoopError(
                    "the loader gave no batch. An iterator can be used only once: pass the loader itself, not iter(loader)."
                )
            self.epoch += 1
            if saving is not None:
                saving.reading.over()
        self.settle()

    def __repr__(self) -> str:
        of = f" of {self.steps}" if self.steps is not None else ""
        doing = ", sizing micro-batches" if self.sizing else ", tuning levers" if self.tuning else ""
        made_of = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        return (
            f"Loop({made_of}, {self.index} steps done{of}, epoch {self.epoch}, {self.plan.describe()}{doing})"
        )

    @property
    def outcomes(self) -> list[Outcome]:
        """For each choice of the plan: whether it is applied, or the reason why not.

        Complete after the first step; with ``plan="auto"``, after tuning.
        """
        if self._autoplan is not None:
            return self._autoplan.outcomes
        return self._levers.outcomes if self._levers is not None else []

    @property
    def plan(self) -> Plan:
        """The active plan: the one you gave, or the one that ``plan="auto"`` found.

        Write it with `Plan.to_toml`, or pass it as ``plan=`` to the next run.
        """
        return (
            self._autoplan.found.plan
            if self._autoplan is not None and self._autoplan.found is not None
            else self._plan
        )

    @property
    def tuning(self) -> bool:
        """Whether the Loop is still tuning levers."""
        return self._autoplan is not None and self._autoplan.found is None

    @property
    def tuned(self) -> Tuned | None:
        """With ``plan="auto"``: the result of each lever, with its ratio and interval.

        None until tuning ends.
        """
        return self._autoplan.found if self._autoplan is not None else None

    @property
    def sizing(self) -> bool:
        """Whether the Loop is still trying sizes of micro-batches."""
        return self._sizer is not None and self._sizer.found is None

    @property
    def sized(self) -> Sized | None:
        """With ``micro_batch="auto"``: the chosen size and the time of each size in ms.

        None until sizing ends.
        """
        return self._sizer.found if self._sizer is not None else None

    def close(self) -> None:
        """Restore the model, the optimizer, the loader and torch's flags where possible.

        The Loop stays usable, without the levers, the master weights and the precision setting. It closes its
        checkpoint folder as well.
        """
        if self._autoplan is not None:
            self._autoplan.take_off()
        if self._levers is not None:
            self._levers.take_off()
        if self.precision.masters is not None:
            self.parameters[:] = [self.precision.masters.own_of(p) for p in self.parameters]
        self.precision.close()
        if self._saving is not None:
            self._saving.leave()
        if self._ranks is not None:
            self._ranks.close()

    def _tuned_by(self, effects: str | None) -> Autoplan:
        if self._ranks is not None or self.precision.masters is not None:
            why = (
                "the ranks of one training" if self._ranks is not None else "an optimizer with master weights"
            )
            raise LoopError(
                f'plan="auto" cannot check levers under {why}. Run `flatout tune COMMAND...` and pass the plan that it writes.'
            )
        assert self._levers is not None
        return Autoplan(
            self._levers.context,
            self._levers.applier,
            self.model,
            self.optimizer,
            self.device,
            effects_of(effects or Effect.PRECISION),
        )

    def _coming(self, batches: int) -> int | None:
        """The maximum number of coming steps, each made of ``batches`` batches; None if unknown."""
        length = _length(self.loader)
        known = [self.steps] if self.steps is not None else []
        if length is not None:
            known.append(self.epochs * length // batches)
        return min(known) if known else None

    def settle(self) -> None:
        """Wait for the result of the last update on the other ranks.

        Raises LoopError if one of them failed.
        """
        if self._ranks is not None:
            self._ranks.settle()

    # -- one step --------------------------------------------------------------------------------------------

    def _step(self, window: list[tuple[Any, int]], ends_epoch: bool | None) -> Step:
        samples = window[0][1] if len(window) == 1 else sum(size for _, size in window)
        lr = self.optimizer.param_groups[0]["lr"]
        ends = self._begun(window) if self._extras else None
        loss, parts, values = self._gradient.make(self.index, window, samples)
        grad_norm = self._update.clipped() if self.clip is not None else None
        skipped = self._update.make(self.index)
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
        if ends is not None:
            ends(parts)
        self.index += 1
        self._rate.step(seconds(), samples)
        return step

    def _begun(self, window: list[tuple[Any, int]]) -> Callable[[int], None]:
        """Do the optional work before a step and return a function that ends it.

        This covers ranks, master weights, sizing and tuning.
        """
        sizer = self._sizer if self.sizing else None
        tuner = self._autoplan if sizer is None and self.tuning else None
        failures = len(self.micro_batches.failed)
        if self._ranks is not None:
            self._ranks.begin()
        if sizer is not None:
            self._gradient.divides(window)
            sizer.step_begins(max(size for _, size in window))
        if self.precision.masters is not None:
            self.precision.masters.follow()
        if tuner is not None:
            tuner.step_begins()

        def ends(parts: int) -> None:
            if sizer is not None:
                sizer.step_ends()
            if tuner is not None:
                tuner.step_ends(parts, len(self.micro_batches.failed) > failures, self._coming(len(window)))
            if self._late is not None:
                self._late.late(parts)
                self._late = None
            self._extras = self._around_a_step()

        return ends

    def _around_a_step(self) -> bool:
        return (
            self._ranks is not None
            or self._late is not None
            or self.precision.masters is not None
            or self.sizing
            or self.tuning
        )


def _parameters(optimizer: Any) -> list[Any]:
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


def _spelled(parallel: Mapping[str, Any] | Pipeline | None) -> str | None:
    if isinstance(parallel, Mapping):
        return ", ".join(f"{name}: {type(style).__name__}" for name, style in parallel.items())
    return str(parallel) if parallel is not None else None


def _positive(name: str, value: Any) -> Any:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise LoopError(
            f"{name}={value!r} is not a whole number from 1" + ("." if name == "epochs" else ", or None.")
        )
    return value


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


__all__ = ["Loop", "Step"]
