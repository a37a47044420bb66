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
from flatout.loop.batches import moved, split
from flatout.loop.finite import Watch, first_bad_module
from flatout.loop.levers import LOGGER, Levers, plan_of
from flatout.loop.memory import MicroBatches, OutOfMemory, Room, Updates, is_out_of_memory, release
from flatout.loop.precision import Precision
from flatout.loop.randomness import RandomState
from flatout.loop.reduction import MEAN, SUM, Answer, Recogniser, understood
from flatout.loop.sizing import Sized, Sizing, StepSeen, fastest
from flatout.loop.step import Rate, Step
from flatout.loop.windows import windows
from flatout.measure.clock import clock_for, seconds
from flatout.plan.errors import LoopError
from flatout.plan.plan import Plan

LEANER = "foreach=False or fused=True needs less memory for a moment, so do smaller micro-batches (micro_batch=...)."
WATCHED_STEPS = 8  # in which it is seen whether a step draws from `random` or numpy
JOINED = {"mean", "sum", "max", "min", "last"}


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
        if strange := {name: how for name, how in self.metrics.items() if how not in JOINED}:
            raise LoopError(f"metrics={strange!r}: values of micro-batches are joined by one of {', '.join(sorted(JOINED))}.")
        self.reduction = reduction
        self.precision = Precision(torch, precision, self.device, self.parameters)
        self._searching = micro_batch == "auto"
        self.micro_batches = MicroBatches(None if micro_batch == "auto" else _positive("micro_batch", micro_batch))
        self.sized: Sized | None = None  # what was chosen, and the times of all sizes
        self._search: Sizing | None = None
        self._updates = Updates(torch, optimizer, self.parameters)
        chosen = plan_of(plan)
        self._levers = Levers(torch, chosen, model, optimizer, loss_fn, loader) if chosen.choices else None
        self._levers_hold = self._levers is None
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

    def close(self) -> None:
        """Take the levers off the model, the optimizer and the loader again, where that can be done. The Loop goes on without them."""
        if self._levers is not None:
            self._levers.take_off()

    # -- one step -----------------------------------------------------------------------------------------------------------

    def _step(self, window: list[tuple[Any, int]], ends_epoch: bool | None) -> Step:
        optimizer = self.optimizer
        samples = window[0][1] if len(window) == 1 else sum(size for _, size in window)
        timing = self._try_size(window) if self._searching else None
        others = self._draws_elsewhere
        state = RandomState(self.torch, self.device, others)
        lr = optimizer.param_groups[0]["lr"]
        while True:
            optimizer.zero_grad(set_to_none=True)
            try:
                loss, parts, values = self._gradients(window, samples)
                break
            except Exception as error:
                if not is_out_of_memory(self.torch, error):
                    raise
                failed = OutOfMemory.seen(error, self.micro_batches.largest(window))
            # Outside of the except block: the exception is gone, and with it the frames that hold the step's tensors.
            optimizer.zero_grad(set_to_none=True)
            release(self.torch, self.device)
            self._smaller(failed, window)
            state.restore()
        if others:
            self._watch_draws(state)
        if self.micro_batches.reduced and not self._searching:
            self.micro_batches.went_well()
        grad_norm = self._clip() if self.clip is not None else None
        skipped = self._update()
        if self.scheduler is not None and not skipped:
            self.scheduler.step()
        step = Step(self.index, self.epoch, loss, lr, samples, parts, grad_norm, values, skipped, ends_epoch, self._rate)
        if timing is not None:
            self._size_seen(*timing)
        if not self._levers_hold:
            self._levers_hold = True
            self._levers.late(parts)
        self.index += 1
        self._rate.step(seconds(), samples)
        return step

    def _gradients(self, window: list[tuple[Any, int]], samples: int) -> tuple[Any, int, dict[str, Any]]:
        """The gradient of the whole effective batch in ``.grad``; its loss, the number of micro-batches, and further values."""
        if len(window) == 1 and self.micro_batches.whole(window[0][1]):
            answer = self._forward(self._on_device(window[0][0]))
            if self._finite is not None:
                self._stop_where_bad(answer.loss, window[0][0])
            self.precision.backward(answer.loss)
            return answer.loss.detach(), 1, self._detached(answer.values)
        self._recognise(window)
        parts = [(part, size) for batch, whole in window for part, size in self._parts(batch, whole)]
        return self._accumulated(parts, samples)

    def _accumulated(self, parts: list[tuple[Any, int]], samples: int) -> tuple[Any, int, dict[str, Any]]:
        """Each micro-batch weighs by what its loss is averaged over. How many tokens there are is known at the end alone, so gradients are first made
        for an estimate of their number and corrected once, on the device; where samples are counted, nothing is to be corrected.
        """
        losses, weights, values = [], [], []
        estimate: Any = None
        for at, (part, size) in enumerate(parts):
            last = at == len(parts) - 1
            with nullcontext() if last else self._no_sync():
                answer = self._forward(self._on_device(part))
                if self._finite is not None and answer.count is None:
                    self._stop_where_bad(answer.loss, part)
                weight: Any = 1.0 if self.reduction == SUM else float(size)
                if answer.count is not None:
                    weight = _as_scalar(self.torch, answer.count, answer.loss)
                if _is_nothing(weight) and (estimate is not None or not last):
                    continue  # no token counts here: its loss is 0 / 0, and in the whole batch it had no part
                if estimate is None:
                    whole = 1.0 if self.reduction == SUM else float(samples)
                    estimate = whole if answer.count is None else weight * (samples / size)
                self.precision.backward(answer.loss * (weight / estimate))
            losses.append(answer.loss.detach())
            weights.append(weight)
            values.append((self._detached(answer.values), size))
        total = sum(weights) if self.reduction != SUM else 1.0
        if hasattr(total, "dtype"):
            self._scale_gradients(estimate / total)
        loss = sum(loss * (weight / total) for loss, weight in zip(losses, weights, strict=True))
        return loss, len(parts), self._joined(values)

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

    def _stop_where_bad(self, loss: Any, batch: Any) -> None:
        bad = self._finite.bad(self.index, loss)
        if bad is None:
            return
        here = bad == self.index
        late = f"the loss of step {bad} was not finite, which was known {self.index - bad} steps later"
        said = f"the loss of step {bad} is {float(loss.detach())}" if here else late
        where = first_bad_module(self.torch, self.model, lambda: self._given(self._on_device(batch)), None)
        kept = "The weights are those before this step." if here else "The weights may be spoiled: go on from your last save."
        raise LoopError(f"{said}: {where}. {kept} on_nan=\"ignore\" trains on.")

    def _forward(self, batch: Any) -> Answer:
        with self.precision.autocast():
            given = self.loss_fn(self.model, batch)
        if type(given) is self.torch.Tensor:
            return Answer(given)
        return understood(given)

    def _on_device(self, batch: Any) -> Any:
        return moved(batch, self.device) if self._moves else batch

    def _parts(self, batch: Any, size: int) -> Iterator[tuple[Any, int]]:
        sizes = self.micro_batches.sizes(size)
        return zip(split(batch, sizes), sizes, strict=True)

    def _no_sync(self) -> Any:
        """Ranks exchange gradients once a step."""
        no_sync = getattr(self.model, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()

    def _scale_gradients(self, factor: Any) -> None:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if gradients:
            with self.torch.no_grad():
                self.torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

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

    def _given(self, batch: Any) -> Any:
        with self.precision.autocast():
            return self.loss_fn(self.model, batch)

    def _try_size(self, window: list[tuple[Any, int]]) -> tuple[Any, int]:
        """Begins a step in micro-batches of the size that is tried out: a mark of the clock, and how often memory had run out by then."""
        if self._search is None:
            self._recognise(window)
            self._clock = clock_for(self.torch, self.device.type)
            self._room = Room(self.torch, self.device)
            self._search = fastest(max(size for _, size in window))
            self.micro_batches.limit = next(self._search)
        return self._clock.mark(), len(self.micro_batches.failed)

    def _size_seen(self, start: Any, failed: int) -> None:
        assert self._search is not None
        end = self._clock.mark()
        self._clock.settle()
        fits = len(self.micro_batches.failed) == failed and self._room.left()
        try:
            self.micro_batches.limit = self._search.send(StepSeen(self._clock.elapsed_ms(start, end), fits))
        except StopIteration as over:
            self.sized, self._searching = over.value, False
            self.micro_batches.settle_on(self.sized.micro_batch)
            LOGGER.info(self.sized.sentence())

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
                Recogniser(self.torch, self.model, lambda part: self._given(self._on_device(part))).refuse_batch_statistics()
                self._recognise([(split(batch, [few, size - few])[0] if size > few else batch, few)])
            except LoopError as refusal:
                raise LoopError(f"out of memory with {failed.size} samples ({failed.said}), and smaller micro-batches would change the gradient: "
                                f"{refusal}") from None
        self.micro_batches.shrink(failed.size)

    # -- values beside the loss ---------------------------------------------------------------------------------------------

    @staticmethod
    def _detached(values: Any) -> dict[str, Any]:
        return {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()} if values else {}

    def _joined(self, values: list[tuple[dict[str, Any], int]]) -> dict[str, Any]:
        joined = {}
        for name in values[0][0]:
            each, sizes = [v[name] for v, _ in values], [size for _, size in values]
            how = self.metrics.get(name, "mean")
            if how == "mean":
                joined[name] = sum(value * size for value, size in zip(each, sizes, strict=True)) / sum(sizes)
            elif how == "sum":
                joined[name] = sum(each)
            elif how == "last":
                joined[name] = each[-1]
            else:
                stacked = self.torch.stack([self.torch.as_tensor(value) for value in each])
                joined[name] = stacked.max() if how == "max" else stacked.min()
        return joined


def _parameters(optimizer: Any) -> list[Any]:
    if not hasattr(optimizer, "param_groups"):
        raise LoopError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim optimizer, made from model.parameters().")
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


def _is_nothing(weight: Any) -> bool:
    """Whether a weight is known to be 0 without waiting for a device."""
    return (not hasattr(weight, "device") or weight.device.type == "cpu") and float(weight) == 0.0


def _as_scalar(torch: Any, count: Any, loss: Any) -> Any:
    """The number that a loss is averaged over, as a tensor beside it: reading it would wait for the device."""
    if hasattr(count, "detach"):
        return count.detach().to(device=loss.device, dtype=torch.promote_types(loss.dtype, torch.float32))
    return torch.tensor(float(count), device=loss.device, dtype=torch.promote_types(loss.dtype, torch.float32))


__all__ = ["Loop", "Step"]
