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
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from flatout.engine.applier import Outcome
from flatout.engine.replay import needs_closure
from flatout.loop.accumulation import HOW, Accumulation, detached
from flatout.loop.batches import moved, split
from flatout.loop.finite import Watch, first_bad_module
from flatout.loop.levers import Levers, plan_of
from flatout.loop.memory import MicroBatches, OutOfMemory, Updates, is_out_of_memory, release
from flatout.loop.precision import Precision
from flatout.loop.randomness import RandomState
from flatout.loop.reduction import MEAN, SUM, Answer, Recogniser, understood
from flatout.loop.sizing import Sized, Sizer
from flatout.loop.step import Rate, Step
from flatout.loop.windows import windows
from flatout.measure.clock import seconds
from flatout.plan.errors import LoopError
from flatout.plan.plan import Plan

LEANER = "foreach=False or fused=True needs less memory for a moment, so do smaller micro-batches (micro_batch=...)."
WATCHED_STEPS = 8  # in which it is seen whether a step draws from `random` or numpy


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
                     holds, and what does not, because
    scheduler        its ``step()`` is called after each optimizer step
    clip             the gradient's norm is clipped to this
    precision        "float32" (whatever the model has), "bf16" or "fp16" (autocast, with a scaler for fp16)
    metrics          how the further scalars of micro-batches are joined: name -> "mean" (by samples, the default), "sum", "max", "min" or "last"
    on_nan           "stop": a loss that is NaN or infinite ends the loop, with the module that made it; "ignore" trains on. With fp16 a step that is
                     skipped is no reason to stop
    allow_inexact    divide batches also where the gradient is then another one (batch normalisation, losses between samples)

    Raises LoopError, in words, for what cannot be trained as asked; what the user's own code raises passes through.
    """

    def __init__(self, model: Any, optimizer: Any, loss_fn: Callable[[Any, Any], Any], loader: Iterable[Any], *, plan: Plan | str | Path | None = None,
                 epochs: int = 1, steps: int | None = None, effective_batch: int | None = None, micro_batch: int | Literal["auto"] | None = None,
                 reduction: str | None = None, scheduler: Any = None, clip: float | None = None, precision: str = "float32",
                 metrics: Mapping[str, str] | None = None, on_nan: str = "stop", allow_inexact: bool = False) -> None:
        import torch

        self.torch = torch
        self.model, self.optimizer, self.loss_fn, self.loader, self.scheduler = model, optimizer, loss_fn, loader, scheduler
        self.parameters = _parameters(optimizer)
        self.device = self.parameters[0].device
        self.epochs, self.steps, self.effective_batch = _positive("epochs", epochs), _positive("steps", steps), _positive("effective_batch", effective_batch)
        self.clip, self.metrics, self.allow_inexact = clip, dict(metrics or {}), allow_inexact
        if clip is not None and not clip > 0:
            raise LoopError(f"clip={clip!r} would stop all training; give the largest norm that a gradient may have, or leave it out.")
        if reduction not in (None, MEAN, SUM):
            raise LoopError(f'reduction={reduction!r}: it is "mean", "sum" or None.')
        if strange := {name: how for name, how in self.metrics.items() if how not in HOW}:
            raise LoopError(f"metrics={strange!r}: values of micro-batches are joined by one of {', '.join(HOW)}.")
        self.reduction = reduction
        self.precision = Precision(torch, precision, self.device, self.parameters)
        self.micro_batches = MicroBatches(None if micro_batch == "auto" else _positive("micro_batch", micro_batch))
        self._sizer = Sizer(torch, self.device, self.micro_batches) if micro_batch == "auto" else None
        self._updates = Updates(torch, optimizer, self.parameters)
        chosen = plan_of(plan)
        self._levers = Levers(torch, chosen, model, optimizer, loss_fn, loader) if chosen.choices else None
        self._late = self._levers  # until the first step is done
        if self._levers is not None:
            self.loader = self._levers.early(loader)
        self.index = 0
        self.epoch = 0
        if on_nan not in ("stop", "ignore"):
            raise LoopError(f'on_nan={on_nan!r}: it is "stop" or "ignore".')
        self._finite = Watch(torch, self.device) if on_nan == "stop" and self.precision.scaler is None else None
        self._rate = Rate()
        self._draws_elsewhere = True  # until it was seen that steps draw from torch alone
        self._drew_elsewhere = False
        self._moves = self.device.type != "cpu"
        distributed = torch.distributed
        self._ranks = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1

    def __iter__(self) -> Iterator[Step]:
        first = self.index
        for _ in range(self.epochs):
            length = _length(self.loader)
            seen = 0
            for window in windows(self.loader, self.effective_batch):
                seen += len(window)
                yield self._step(window, None if length is None else seen >= length)
                if self.steps is not None and self.index - first >= self.steps:
                    return
            if not seen:
                raise LoopError("the loader gave no batch. An iterator can be gone through only once: give the loader itself, not iter(loader).")
            self.epoch += 1

    @property
    def outcomes(self) -> list[Outcome]:
        """Of each choice of the plan: applied, or not, because. Complete after the first step."""
        return self._levers.outcomes if self._levers is not None else []

    @property
    def sizing(self) -> bool:
        """Whether sizes of micro-batches are still tried out."""
        return self._sizer is not None and self._sizer.found is None

    @property
    def sized(self) -> Sized | None:
        """With ``micro_batch="auto"``: what was chosen and what every size took, once that is known."""
        return self._sizer.found if self._sizer is not None else None

    def close(self) -> None:
        """Take the levers off the model, the optimizer and the loader again, where that can be done. The Loop goes on without them."""
        if self._levers is not None:
            self._levers.take_off()

    # -- one step -----------------------------------------------------------------------------------------------------------

    def _step(self, window: list[tuple[Any, int]], ends_epoch: bool | None) -> Step:
        optimizer = self.optimizer
        samples = window[0][1] if len(window) == 1 else sum(size for _, size in window)
        sizer = self._sizer if self.sizing else None
        if sizer is not None:
            self._recognise(window)
            sizer.step_begins(max(size for _, size in window))
        others = self._draws_elsewhere
        state = RandomState(self.torch, self.device, others)
        lr = optimizer.param_groups[0]["lr"]
        while True:
            optimizer.zero_grad(set_to_none=True)
            try:
                loss, parts, values = self._gradients(window, samples)
                break
            except Exception as error:
                if not is_out_of_memory(self.torch, error) or self._ranks > 1:  # one rank alone must not do a step again: the others wait in another place
                    raise
                failed = OutOfMemory.seen(error, self.micro_batches.largest(window))
            # Outside of the except block: the exception is gone, and with it the frames that hold the step's tensors.
            optimizer.zero_grad(set_to_none=True)
            release(self.torch, self.device)
            self._smaller(failed, window)
            state.restore()
        if others:
            self._watch_draws(state)
        if self.micro_batches.reduced and sizer is None:
            self.micro_batches.went_well()
        grad_norm = self._clip() if self.clip is not None else None
        skipped = self._update()
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        step = Step(self.index, self.epoch, loss, lr, samples, parts, grad_norm, values, skipped, ends_epoch, self._rate)
        if sizer is not None:
            sizer.step_ends()
        if self._late is not None:
            self._late.late(parts)
            self._late = None
        self.index += 1
        self._rate.step(seconds(), samples)
        return step

    def _gradients(self, window: list[tuple[Any, int]], samples: int) -> tuple[Any, int, dict[str, Any]]:
        """The gradient of the whole effective batch in ``.grad``; its loss, the number of micro-batches, and further values."""
        if len(window) == 1 and self.micro_batches.whole(window[0][1]):
            answer = self._forward(self._on_device(window[0][0]))
            if self._finite is not None:
                self._stop_where_bad(self._finite, answer.loss, window[0][0])
            self.precision.backward(answer.loss)
            return answer.loss.detach(), 1, detached(answer.values)
        self._recognise(window)
        parts = [(part, size) for batch, whole in window for part, size in self._parts(batch, whole)]
        sums = Accumulation(self.torch, self.precision, self.reduction == SUM, samples)
        for at, (part, size) in enumerate(parts):
            with self._no_sync() if at < len(parts) - 1 else nullcontext():
                answer = self._forward(self._on_device(part))
                if self._finite is not None and answer.count is None:
                    self._stop_where_bad(self._finite, answer.loss, part)
                sums.add(answer, size, last=at == len(parts) - 1)
        return sums.loss(self.parameters), len(parts), sums.values(self.metrics)

    def _update(self) -> str:
        """The optimizer's step; why it was left out, or nothing. Out of memory before any weight or state has moved, it is tried once more."""
        before = self._updates.stamp()
        for _ in range(2):
            try:
                return self.precision.step(self.optimizer)
            except Exception as error:
                if not is_out_of_memory(self.torch, error):
                    raise
                failed = OutOfMemory.seen(error, 0)
            release(self.torch, self.device)
            if not self._updates.undo(before):
                raise LoopError(f"the optimizer ran out of memory and may have begun to move weights ({failed.said}), so they may be those of half a step "
                                f"and cannot be trusted: go on from your last save. {LEANER}")
        raise LoopError(f"the optimizer ran out of memory, twice, before it had moved any weight ({failed.said}). {LEANER}")

    def _stop_where_bad(self, watch: Watch, loss: Any, batch: Any) -> None:
        bad = watch.bad(self.index, loss)
        if bad is None:
            return
        here = bad == self.index
        late = f"the loss of step {bad} was not finite, which was known {self.index - bad} steps later"
        said = f"the loss of step {bad} is {float(loss.detach())}" if here else late
        where = first_bad_module(self.torch, self.model, lambda: self._given(self._on_device(batch)))
        kept = "The weights are those before this step." if here else "The weights may be spoiled: go on from your last save."
        raise LoopError(f"{said}: {where}. {kept} on_nan=\"ignore\" trains on.")

    def _forward(self, batch: Any) -> Answer:
        return understood(self._given(batch))

    def _given(self, batch: Any) -> Any:
        with self.precision.autocast():
            return self.loss_fn(self.model, batch)

    def _on_device(self, batch: Any) -> Any:
        return moved(batch, self.device) if self._moves else batch

    def _parts(self, batch: Any, size: int) -> Iterator[tuple[Any, int]]:
        sizes = self.micro_batches.sizes(size)
        return zip(split(batch, sizes), sizes, strict=True)

    def _no_sync(self) -> Any:
        """Ranks exchange gradients once a step."""
        no_sync = getattr(self.model, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()

    def _clip(self) -> Any:
        self.precision.unscale(self.optimizer)
        return self.torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)

    # -- what is learned on the way -----------------------------------------------------------------------------------------

    def _recognise(self, window: list[tuple[Any, int]]) -> None:
        if self.reduction is not None:
            return
        if self.allow_inexact:
            self.reduction = MEAN
            return
        batch, size = window[0]
        recogniser = Recogniser(self.torch, self.model, lambda part: self._given(self._on_device(part)))
        self.reduction = recogniser.recognise(batch, size)

    def _watch_draws(self, before: RandomState) -> None:
        self._drew_elsewhere |= before.others_moved()
        if self.index + 1 >= WATCHED_STEPS:
            self._draws_elsewhere = self._drew_elsewhere

    def _smaller(self, failed: OutOfMemory, window: list[tuple[Any, int]]) -> None:
        """Smaller micro-batches from here on. Raises LoopError where there are none, or none that are exact."""
        if failed.size <= 1:
            raise LoopError(f"out of memory with a single sample: {failed.said}. {failed.what_would_fit()}") from None
        if self.reduction is None:
            try:
                batch, size = window[0]
                few = min(size, 2)
                self._recognise([(split(batch, [few, size - few])[0] if size > few else batch, few)])
            except LoopError as refusal:
                raise LoopError(f"out of memory with {failed.size} samples ({failed.said}), and smaller micro-batches would change the gradient: "
                                f"{refusal}") from None
        self.micro_batches.shrink(failed.size)


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
