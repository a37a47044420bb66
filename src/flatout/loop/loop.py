"""The training loop as an object: iterating it trains, each item is one optimizer step.

    for step in flatout.Loop(model, optimizer, loss_fn, loader, epochs=3):
        if step.index % 100 == 0:
            print(step.index, float(step.loss))

What happens inside one step, for an effective batch of one or more batches of the loader, each cut into one or more micro-batches:

    zero_grad, for each micro-batch: forward, loss, backward; clip; optimizer.step; scheduler.step

The gradient is the one that the whole effective batch would have given (`flatout.loop.reduction` says when there is such a thing). A step of one
micro-batch is the raw loop, bit for bit. Should memory run out in it, the step is done again from its start in smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from flatout.engine.applier import Outcome
from flatout.engine.replay import needs_closure
from flatout.loop.accumulation import HOW
from flatout.loop.autoplan import Autoplan, effects_of
from flatout.loop.company import company_of
from flatout.loop.finite import Watch
from flatout.loop.gradient import Gradient
from flatout.loop.kept import Kept, storable
from flatout.loop.levers import Levers, plan_of
from flatout.loop.memory import MicroBatches
from flatout.loop.opened import measured, opened
from flatout.loop.pipeline_parallel import Pipeline, PipelineParallel
from flatout.loop.precision import Precision
from flatout.loop.ranks import ranks_of
from flatout.loop.reduction import MEAN, SUM
from flatout.loop.resumed import Resumed
from flatout.loop.saving import Saving
from flatout.loop.sizing import Sized, Sizer
from flatout.loop.step import Rate, Step
from flatout.loop.tensor_parallel import TensorParallel, refused
from flatout.loop.training import Training
from flatout.loop.tuning import Tuned
from flatout.loop.update import Update
from flatout.loop.windows import windows
from flatout.measure.clock import seconds
from flatout.plan.errors import LoopError
from flatout.plan.plan import Plan
from flatout.plan.words import Effect

AUTO = "auto"


class Loop:
    """Trains ``model`` on the batches of ``loader``; iterate over it.

    model            an nn.Module, on the device where it is to train
    optimizer        of its parameters
    loss_fn          ``loss_fn(model, batch)`` gives the loss, a scalar tensor: a mean or a sum over the samples of the batch. Where it is the mean over
                     something else, it gives ``(loss, n)`` with that number (tokens that count, pixels; on a device, never 0). A dict of further
                     scalars may stand behind either: they come out as ``step.metrics``
    loader           an iterable of batches, iterated over once an epoch: a DataLoader, a list. Batches are nested tuples, lists, mappings or
                     dataclasses of tensors with the samples along their first dimension; they are moved to the model's device
    epochs           times over the loader
    steps            optimizer steps after which the loop ends, wherever it stands then
    effective_batch  samples of one optimizer step: a multiple of the loader's batch. None: the loader's batch
    micro_batch      samples of one forward and backward pass at most. None: the loader's batch, or less once that did not fit. "auto": the fastest
                     size that fits, tried out in the first steps, none of which is wasted
    reduction        "mean" or "sum", where ``loss_fn`` cannot be tried out; None: it is tried out when a batch is first to be divided
    plan             a `flatout.Plan`, or the path of a flatout.toml: levers applied to these very objects. ``loop.outcomes`` says what of it
                     holds, and what does not, because. "auto": levers are tried out in the first steps, none of which is wasted; ``loop.tuned``,
                     ``loop.plan`` say what was found
    effects          what plan="auto" may change: "exact" (no bit), "rounding" (the same maths, rounded otherwise) or "precision" (the
                     default: also products in half precision)
    scheduler        its ``step()`` is called after each optimizer step
    clip             the gradient's norm is clipped to this
    precision        "float32" (whatever the model has), "tf32", "bf16" or "fp16" (autocast, with a scaler for fp16), "fp8" (torchao), "bf16-master" or
                     "fp16-master": a model that is narrow itself, and an optimizer that has copies of its parameters in float32
    metrics          how the further scalars of micro-batches are joined: name -> "mean" (by samples, the default), "sum", "max", "min" or "last"
    on_nan           "stop": a loss that is NaN or infinite ends the loop, with the module that made it; "ignore" trains on. With fp16 a step that is
                     skipped is no reason to stop
    parallel         module name -> style of torch.distributed.tensor.parallel (ColwiseParallel(), ...): those layers are divided over the ranks, all of which
                     are given the same batches. The optimizer has the divided parameters from then on. Or a `flatout.Pipeline`: each rank has one stage
    allow_inexact    divide batches also where the gradient is then another one (batch normalisation, losses between samples)
    saves            a folder that this training keeps saves in. Started again, the program goes on from the newest one that can be believed, with the very
                     bits of a run that was not interrupted; ``loop.resumed`` says what happened. SIGTERM, SIGINT, SIGHUP and SIGUSR1 end the program after
                     the step under way and a save
    save_every       steps between two saves; with 1, each is waited for and no step is ever lost. None: as often as 1 % of the time allows
    also             what is to be saved beside: name -> an object with ``state_dict`` and ``load_state_dict``, an average of the weights for instance
    fresh            begin anew though there are saves; those go into a folder beside
    on_drift         "say": what differs since the save (torch, threads, devices, script, data) is said, and no exactness claimed; "stop": LoopError

    Raises LoopError, in words, for what cannot be trained as asked; what the user's own code raises passes through.
    """

    def __init__(self, model: Any, optimizer: Any, loss_fn: Callable[[Any, Any], Any], loader: Iterable[Any], *, plan: Plan | str | Path | None = None,
                 effects: str | None = None, epochs: int = 1, steps: int | None = None, effective_batch: int | None = None,
                 micro_batch: int | Literal["auto"] | None = None, reduction: str | None = None, scheduler: Any = None, clip: float | None = None,
                 precision: str = "float32", metrics: Mapping[str, str] | None = None, on_nan: str = "stop",
                 parallel: Mapping[str, Any] | Pipeline | None = None, allow_inexact: bool = False, saves: str | Path | None = None,
                 save_every: int | None = None, also: Mapping[str, Any] | None = None, fresh: bool = False, on_drift: str = "say") -> None:
        import torch

        self.torch = torch
        self.model, self.optimizer, self.loss_fn, self.loader, self.scheduler = model, optimizer, loss_fn, loader, scheduler
        self.parameters = _parameters(optimizer)
        self.device = self.parameters[0].device
        divided: TensorParallel | PipelineParallel | None = None
        if parallel is not None:
            refused(plan=(plan, (None,)), micro_batch=(micro_batch if micro_batch == "auto" else None, (None,)), precision=(precision, ("float32", "tf32")),
                    model=(type(model).__name__, {type(model).__name__} - {"DistributedDataParallel", "DataParallel"}))
            divided = (PipelineParallel(torch, model, optimizer, parallel, self.device, reduction, on_nan == "stop") if isinstance(parallel, Pipeline)
                       else TensorParallel(torch, model, optimizer, parallel, self.device))
            self.parameters = _parameters(optimizer)
        self.epochs, self.steps, self.effective_batch = _positive("epochs", epochs), _positive("steps", steps), _positive("effective_batch", effective_batch)
        self.clip, self.metrics = clip, dict(metrics or {})
        if clip is not None and not clip > 0:
            raise LoopError(f"clip={clip!r} would stop all training; give the largest norm that a gradient may have, or leave it out.")
        if reduction not in (None, MEAN, SUM):
            raise LoopError(f'reduction={reduction!r}: it is "mean", "sum" or None.')
        if strange := {name: how for name, how in self.metrics.items() if how not in HOW}:
            raise LoopError(f"metrics={strange!r}: values of micro-batches are joined by one of {', '.join(HOW)}.")
        if on_nan not in ("stop", "ignore"):
            raise LoopError(f'on_nan={on_nan!r}: it is "stop" or "ignore".')
        if on_drift not in ("say", "stop"):
            raise LoopError(f'on_drift={on_drift!r}: it is "say" or "stop".')
        if saves is None and (save_every is not None or also or fresh):
            raise LoopError("save_every=, also= and fresh= say how a training is saved, and it is not: name a folder, saves=\"saves\".")
        every, plan = _positive("save_every", save_every), plan if plan == AUTO else plan_of(plan)
        if strange := {name: type(thing).__name__ for name, thing in (also or {}).items() if not hasattr(thing, "load_state_dict")}:
            raise LoopError(f"also={strange!r}: what is to be saved beside has state_dict and load_state_dict.")
        self._ranks = ranks_of(torch, model) if divided is None else None
        rejoin = self._ranks.rejoin if self._ranks is not None else None
        self.precision = Precision(torch, precision, model, optimizer, self.device, self.parameters, rejoin is not None)
        training = Training(torch, model, model.module if rejoin is not None else model, optimizer, loss_fn, self.parameters, self.device, self.precision,
                            self._ranks, divided)
        self.micro_batches = MicroBatches(None if micro_batch == "auto" else _positive("micro_batch", micro_batch))
        agreed = self._ranks.slowest if self._ranks is not None else list
        self._sizer = Sizer(torch, self.device, self.micro_batches, agreed) if micro_batch == "auto" else None
        watch = Watch(torch, self.device) if on_nan == "stop" and self.precision.scaler is None else None
        self._gradient = Gradient(training, self.micro_batches, self.metrics, reduction, allow_inexact, watch)
        self._update = Update(training, clip)
        self._saving: Saving | None = None
        if saves is not None and not measured():
            storable(model)
            company = company_of(torch, model)
            self._saving = Saving(torch, opened(Path(saves), fresh, company), every, on_drift, company)
        if plan == AUTO and self._saving is not None and self._saving.plan is not None:
            plan, effects = Plan.from_toml(self._saving.plan), None  # what was found is not searched for again
        self._plan = plan if isinstance(plan, Plan) else Plan()
        self._levers = Levers(torch, self._plan, model, optimizer, loss_fn, loader) if plan == AUTO or self._plan.choices else None
        self._autoplan = self._tuned_by(effects) if plan == AUTO else None
        if effects is not None and self._autoplan is None:
            raise LoopError(f'effects={effects!r} narrows what plan="auto" may find; a plan that is given holds what it holds.')
        self._late = self._levers if self._plan.choices else None  # until the first step is done
        if self._late is not None:
            self.loader = self._late.early(loader)
        self.index = 0
        self.epoch = 0
        self._rate = Rate()
        self.resumed: Resumed | None = None
        if self._saving is not None:
            settings = {"model": type(getattr(model, "module", model)).__name__, "optimizer": type(optimizer).__name__,
                        "scheduler": type(scheduler).__name__, "precision": precision, "clip": clip, "effective batch": effective_batch,
                        "micro-batch": micro_batch, "parallel": _spelled(parallel)}
            kept = Kept(self, self._gradient, self._update, self._sizer, also or {}, divided.stage if isinstance(divided, PipelineParallel) else None)
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
        """Steps, from the one with which this training began: it goes on after ``index`` of them."""
        saving = self._saving
        while self.epoch - first_epoch < self.epochs and (self.steps is None or self.index - first < self.steps):
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
                raise LoopError("the loader gave no batch. An iterator can be gone through only once: give the loader itself, not iter(loader).")
            self.epoch += 1
            if saving is not None:
                saving.reading.over()
        self.settle()

    def __repr__(self) -> str:
        of = f" of {self.steps}" if self.steps is not None else ""
        doing = ", trying out micro-batches" if self.sizing else ", trying out levers" if self.tuning else ""
        made_of = f"{type(self.model).__name__}, {type(self.optimizer).__name__}"
        return f"Loop({made_of}, {self.index} steps done{of}, epoch {self.epoch}, {self.plan.describe()}{doing})"

    @property
    def outcomes(self) -> list[Outcome]:
        """Of each choice of the plan: applied, or not, because. Complete after the first step; with ``plan="auto"`` when it has been tuned."""
        if self._autoplan is not None:
            return self._autoplan.outcomes
        return self._levers.outcomes if self._levers is not None else []

    @property
    def plan(self) -> Plan:
        """What holds: the plan that was given, or the one that ``plan="auto"`` has found, for ``plan=`` of the next run or `Plan.to_toml`."""
        return self._autoplan.found.plan if self._autoplan is not None and self._autoplan.found is not None else self._plan

    @property
    def tuning(self) -> bool:
        """Whether levers are still tried out."""
        return self._autoplan is not None and self._autoplan.found is None

    @property
    def tuned(self) -> Tuned | None:
        """With ``plan="auto"``: how each lever ended, with its ratio and interval, once that is known."""
        return self._autoplan.found if self._autoplan is not None else None

    @property
    def sizing(self) -> bool:
        """Whether sizes of micro-batches are still tried out."""
        return self._sizer is not None and self._sizer.found is None

    @property
    def sized(self) -> Sized | None:
        """With ``micro_batch="auto"``: what was chosen and what every size took, once that is known."""
        return self._sizer.found if self._sizer is not None else None

    def close(self) -> None:
        """Put the model, the optimizer, the loader and torch's switches back as they were, where that can be done. The Loop goes on without all that."""
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
            why = "the ranks of one training" if self._ranks is not None else "an optimizer with master weights"
            raise LoopError(f'plan="auto" cannot guard levers under {why}. Tune with `flatout tune COMMAND...` and give the plan that it writes.')
        assert self._levers is not None
        return Autoplan(self._levers.scene, self._levers.applier, self.model, self.optimizer, self.device, effects_of(effects or Effect.PRECISION))

    def _coming(self, batches: int) -> int | None:
        """Steps that are to come at most, where that is known; each is made of so many batches."""
        length = _length(self.loader)
        known = [self.steps] if self.steps is not None else []
        if length is not None:
            known.append(self.epochs * length // batches)
        return min(known) if known else None

    def settle(self) -> None:
        """Hear how the last update went on the other ranks."""
        if self._ranks is not None:
            self._ranks.settle()

    # -- one step -----------------------------------------------------------------------------------------------------------

    def _step(self, window: list[tuple[Any, int]], ends_epoch: bool | None) -> Step:
        samples = window[0][1] if len(window) == 1 else sum(size for _, size in window)
        lr = self.optimizer.param_groups[0]["lr"]
        ends = self._begun(window) if self._extras else None
        loss, parts, values = self._gradient.make(self.index, window, samples)
        grad_norm = self._update.clipped() if self.clip is not None else None
        skipped = self._update.make(self.index)
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        step = Step(self.index, self.epoch, loss, lr, samples, parts, grad_norm, values, skipped, ends_epoch, self._rate)
        if ends is not None:
            ends(parts)
        self.index += 1
        self._rate.step(seconds(), samples)
        return step

    def _begun(self, window: list[tuple[Any, int]]) -> Callable[[int], None]:
        """What some Loops have around a step: ranks that must meet, copies of weights, sizes or levers that are tried out. Gives what ends it."""
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
        return self._ranks is not None or self._late is not None or self.precision.masters is not None or self.sizing or self.tuning


def _parameters(optimizer: Any) -> list[Any]:
    if not hasattr(optimizer, "param_groups"):
        raise LoopError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim optimizer, made from model.parameters().")
    if needs_closure(optimizer):
        raise LoopError(f"{type(optimizer).__name__} runs forward and backward several times inside one step, which a Loop cannot do for it. Call "
                        "optimizer.step(closure) in a loop of your own.")
    found = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if not found:
        raise LoopError("the optimizer has no parameter that needs a gradient, so there is nothing to train.")
    return list(found.values())


def _spelled(parallel: Mapping[str, Any] | Pipeline | None) -> str | None:
    if isinstance(parallel, Mapping):
        return ", ".join(f"{name}: {type(style).__name__}" for name, style in parallel.items())
    return str(parallel) if parallel is not None else None


def _positive(name: str, value: Any) -> Any:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise LoopError(f"{name}={value!r}: a whole number from 1 is needed" + ("." if name == "epochs" else ", or None."))
    return value


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


__all__ = ["Loop", "Step"]
