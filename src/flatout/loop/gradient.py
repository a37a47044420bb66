"""Compute the gradient of one effective batch into ``.grad``.

A batch that fits is one forward and one backward pass, as in a plain loop. A batch that does not fit, or an
effective batch of several, is accumulated from micro-batches. If memory runs out, the step restarts with the
same random state in smaller micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from math import isfinite
from typing import TYPE_CHECKING, Any

from flatout.loop.accumulation import Accumulation, detached
from flatout.loop.batches import moved, split
from flatout.loop.finite import LossMonitor, first_bad_module
from flatout.loop.memory import MicroBatches, OutOfMemory, is_out_of_memory, release
from flatout.loop.randomness import RandomState
from flatout.loop.reduction import MEAN, SUM, Recogniser, understood
from flatout.loop.training import Training
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

WATCHED_STEPS = 8  # the first steps, which detect the generators that a step draws from
WATCHED_AGAIN = 64  # if none drew, check one step in this many: dropout may be enabled later

Window = list[tuple[Any, int]]  # the batches of one effective batch, each with its number of samples


class Gradient:
    """``reduction`` is "mean" or "sum", or None until tested.

    ``watch`` is None if NaN does not stop the loop.
    """

    def __init__(
        self,
        training: Training,
        micro_batches: MicroBatches,
        metrics: Mapping[str, str],
        reduction: str | None,
        allow_inexact: bool,
        watch: LossMonitor | None,
    ) -> None:
        self.training, self.micro_batches, self.metrics = training, micro_batches, metrics
        self.reduction, self.allow_inexact, self._watch = reduction, allow_inexact, watch
        self._tensor = training.torch.Tensor
        self._reads_losses = watch is not None and not watch.waits
        self._parallel = training.model if training.model is not training.alone else None
        self._moves = training.device.type != "cpu"
        self._draws = self._draws_elsewhere = False  # from torch's generators, from `random` or numpy

    def make(self, index: int, window: Window, samples: int) -> tuple[Any, int, dict[str, Any]]:
        """Return the loss of the effective batch, the number of micro-batches and further values.

        Raises LoopError.
        """
        training = self.training
        optimizer = training.optimizer
        watched = index < WATCHED_STEPS
        state = None
        if self._draws or self._draws_elsewhere or watched or not index % WATCHED_AGAIN:
            state = RandomState(training.torch, training.device, others=watched or self._draws_elsewhere)
        while True:
            optimizer.zero_grad(set_to_none=True)
            try:
                limit = self.micro_batches.limit
                fits = len(window) == 1 and (limit is None or window[0][1] <= limit)
                made = self._whole(index, window[0][0]) if fits else self._accumulated(index, window, samples)
                if state is not None and not self._draws:
                    self._draws = state.moved()
                break
            except Exception as error:
                if not is_out_of_memory(training.torch, error):
                    raise
                failed = OutOfMemory.seen(error, self.micro_batches.largest(window))
            # Outside the except block, so that the frames that hold the step's tensors are freed.
            optimizer.zero_grad(set_to_none=True)
            release(training.torch, training.device)
            self._smaller(failed, window)
            if state is not None:
                state.restore()
        if watched and state is not None:
            self._draws_elsewhere |= state.others_moved()
        return made

    def state(self) -> dict[str, Any]:
        """The detected reduction and generators, for a checkpoint."""
        return {"reduction": self.reduction, "draws": self._draws, "draws_elsewhere": self._draws_elsewhere}

    def load_state(self, state: dict[str, Any]) -> None:
        self.reduction = state["reduction"] if self.reduction is None else self.reduction
        self._draws, self._draws_elsewhere = state["draws"], state["draws_elsewhere"]

    def _accumulated(self, index: int, window: Window, samples: int) -> tuple[Any, int, dict[str, Any]]:
        self.recognise(window)
        training, sizes = self.training, self.micro_batches.sizes
        parts = [
            pair
            for batch, whole in window
            for pair in zip(split(batch, sizes(whole)), sizes(whole), strict=True)
        ]
        sums = Accumulation(
            training.torch,
            training.precision,
            self.reduction == SUM,
            samples,
            self._parallel,
        )
        for at, (part, size) in enumerate(parts):
            with self._no_sync() if at < len(parts) - 1 else nullcontext():
                answer = understood(self._loss_of(self._on_device(part), training.model))
                if self._watch is not None and answer.count is None:
                    self._stop_where_bad(self._watch, index, answer.loss, part)
                sums.add(answer, size, last=at == len(parts) - 1)
        return sums.loss(training.parameters), len(parts), sums.values(self.metrics)

    def _whole(self, index: int, batch: object) -> tuple[Any, int, dict[str, Any]]:
        """One forward and backward pass as in a plain loop.

        This is the hot path: call nothing unnecessary.
        """
        training, plain = self.training, self.training.precision.plain
        if self._moves:
            batch = self._on_device(batch)
        given = training.loss_fn(training.model, batch) if plain else self._loss_of(batch, training.model)
        if type(given) is self._tensor:
            loss, values = given, {}
        else:
            answer = understood(given)
            loss, values = answer.loss, detached(answer.values)
        if self._watch is not None and not (self._reads_losses and isfinite(loss.item())):
            self._stop_where_bad(self._watch, index, loss, batch)
        if plain:
            loss.backward()
        else:
            training.precision.backward(loss)
        return loss.detach(), 1, values

    def _loss_of(self, batch: object, model: Module) -> Any:
        with self.training.precision.autocast():
            return self.training.loss_fn(model, batch)

    def _alone(self, batch: object) -> Any:
        """The result of loss_fn with the model that one rank may call without the others."""
        return self._loss_of(self._on_device(batch), self.training.alone)

    def _on_device(self, batch: object) -> Any:
        return moved(batch, self.training.device) if self._moves else batch

    def _no_sync(self) -> Any:
        """Ranks exchange gradients once per step."""
        no_sync = getattr(self.training.model, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()

    def _stop_where_bad(self, watch: LossMonitor, index: int, loss: Tensor, batch: object) -> None:
        bad = watch.bad(index, loss)
        if bad is None:
            return
        here = bad == index
        late = f"the loss of step {bad} was not finite (detected {index - bad} steps later)"
        said = f"the loss of step {bad} is {float(loss.detach())}" if here else late
        where = first_bad_module(self.training.torch, self.training.alone, lambda: self._alone(batch))
        kept = (
            "The weights are those before this step."
            if here
            else "The weights may be corrupt: resume from your last checkpoint."
        )
        raise LoopError(f'{said}: {where}. {kept} on_nan="ignore" continues.')

    # -- what the first steps determine ----------------------------------------------------------------------

    def recognise(self, window: Window) -> None:
        """Test once how a batch can be split. Raises LoopError if it cannot."""
        if self.reduction is not None:
            return
        if self.allow_inexact:
            self.reduction = MEAN
            return
        batch, size = window[0]
        self.reduction = Recogniser(self.training.torch, self.training.alone, self._alone).recognise(
            batch, size
        )

    def _smaller(self, failed: OutOfMemory, window: Window) -> None:
        """Use smaller micro-batches from now on.

        Raises LoopError if there are none, or none with the exact gradient.
        """
        if failed.size <= 1:
            raise LoopError(
                f"out of memory with a single sample: {failed.message}. {failed.what_would_fit()}"
            ) from None
        if self.training.ranks > 1:
            raise LoopError(
                f"out of memory with {failed.size} samples ({failed.message}). With several ranks the step cannot be repeated: the others "
                f"wait inside the exchange of gradients. Use smaller micro-batches: micro_batch={failed.size // 2}."
            )
        if self.reduction is None:
            try:
                self.recognise(list(_few(window)))
            except LoopError as refusal:
                raise LoopError(
                    f"out of memory with {failed.size} samples ({failed.message}). Smaller micro-batches would change the gradient: "
                    f"{refusal}"
                ) from None
        self.micro_batches.shrink(failed.size)


def _few(window: Window) -> Iterator[tuple[Any, int]]:
    """Two samples, which fit into memory when a batch does not."""
    batch, size = window[0]
    few = min(size, 2)
    yield (split(batch, [few, size - few])[0] if size > few else batch), few
