"""Determine how the loss of a batch follows from the losses of its parts: mean, sum, or not at all.

An accumulated gradient equals the whole batch's only if the loss is a mean or a sum over independent samples.
The first batch to be split tests this: it compares the loss of the whole with the losses of two uneven parts.
The test runs without gradients and restores the random state and all buffers. Batch normalisation and losses
between samples (contrastive ones) do not add up and are rejected with an error that says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.batches import split
from flatout.loop.randomness import preserve_random_state
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

MEAN, SUM = "mean", "sum"
TOLERANCES = {
    "torch.float64": 1e-9,
    "torch.float32": 1e-4,
}  # relative, of a loss; other dtypes count as bfloat16
COARSE_TOLERANCE = 3e-2
DOES_NOT_FOLLOW = "the loss of a batch does not follow from the losses of its parts"
ADVICE = (
    "Train with the loader's own batches (remove effective_batch and micro_batch), set the batch size in the loader, or use "
    "allow_inexact=True to accept the gradient of another loss."
)


@dataclass(frozen=True)
class LossResult:
    """The result of ``loss_fn``: the loss, the number it is averaged over and further values by name.

    ``count`` is None for a mean over samples.
    """

    loss: Tensor
    count: Tensor | float | None = None
    values: dict[str, Any] | None = None


def parse_loss(returned: object) -> LossResult:
    """Parse ``loss``, ``(loss, n)``, ``(loss, values)`` or ``(loss, n, values)``.

    Raises LoopError for anything else.
    """
    if hasattr(returned, "backward"):
        return LossResult(returned)
    if isinstance(returned, tuple) and returned and hasattr(returned[0], "backward") and len(returned) <= 3:
        rest = list(returned[1:])
        values = rest.pop() if rest and isinstance(rest[-1], dict) else None
        if len(rest) <= 1 and not any(isinstance(value, (dict, str)) for value in rest):
            return LossResult(returned[0], rest[0] if rest else None, values)
    description = (
        f"a tuple of {', '.join(type(value).__name__ for value in returned)}"
        if isinstance(returned, tuple)
        else f"a {type(returned).__name__}"
    )
    raise LoopError(
        f"loss_fn gave {description}. Return the loss (a scalar tensor), or (loss, n) with the number that it is averaged over; "
        "a dict of further values may follow."
    )


class ReductionTest:
    """Tests the loss once. ``call(batch)`` is the user's loss_fn with the model, as in training."""

    def __init__(self, torch: ModuleType, model: Module, call: Callable[[Any], Any]) -> None:
        self.torch, self.model, self.call = torch, model, call

    def run(self, batch: object, size: int) -> str:
        """Return ``mean`` or ``sum``.

        Raises LoopError if the loss of a batch does not follow from those of its parts.
        """
        self._reject_batch_norm()
        if size < 2:
            raise LoopError(
                "the loader gives one sample at a time, so whether the loss is a mean or a sum over samples cannot be tested. "
                'Pass reduction="mean" or reduction="sum".'
            )
        splits = [
            [first, size - first] for first in sorted({1, max(1, size // 3)})
        ]  # one split may match by chance
        device = next((p.device for p in self.model.parameters()), None)
        with preserve_random_state(self.torch, device), self._preserve_buffers(), self.torch.no_grad():
            with self._without_dropout():
                whole, repeated = self._loss(batch), self._loss(batch)
                if self._is_close(whole.loss, repeated.loss, whole.loss):
                    return self._compare_all(whole, batch, splits)
            with self._eval_mode():  # the model is random in training mode: compare in evaluation mode
                return self._compare_all(self._loss(batch), batch, splits)

    def _loss(self, batch: object) -> LossResult:
        result = parse_loss(self.call(batch))
        if result.loss.dim():
            raise LoopError(
                f"loss_fn gave a loss of shape {list(result.loss.shape)}; it must be a scalar. Use its mean() or sum()."
            )
        return result

    def _compare_all(self, whole: LossResult, batch: object, splits: list[list[int]]) -> str:
        reductions = [
            self._compare(whole, [self._loss(part) for part in split(batch, sizes)], sizes)
            for sizes in splits
        ]
        return reductions[-1]

    def _compare(self, whole: LossResult, parts: list[LossResult], sizes: list[int]) -> str:
        counts = [
            float(part.count) if part.count is not None else float(size)
            for part, size in zip(parts, sizes, strict=True)
        ]
        losses = [
            float(part.loss) if count else 0.0 for part, count in zip(parts, counts, strict=True)
        ]  # a mean over nothing counts 0
        mean = sum(count * loss for count, loss in zip(counts, losses, strict=True)) / max(
            sum(counts), 1e-300
        )
        # A loss of zero is both a mean and a sum; either is right.
        if self._is_close(mean, whole.loss, whole.loss):
            return MEAN
        figures = (
            f"the loss of the first batch of {sum(sizes)} samples is {float(whole.loss):.6g}, those of its first {sizes[0]} and last {sizes[1]} are "
            f"{losses[0]:.6g} and {losses[1]:.6g}"
        )
        if self._is_close(sum(losses), whole.loss, whole.loss):
            if whole.count is None:
                return SUM
            raise LoopError(
                f"loss_fn returns (loss, n), where the loss must be the mean over n, but {figures}: it is a sum. Return the mean, or the loss alone."
            )
        if whole.count is None:
            raise LoopError(
                f"{DOES_NOT_FOLLOW}: {figures}; that is neither their mean nor their sum over samples. If it is a mean over something else (tokens, "
                f"pixels), return (loss, n) from loss_fn. If samples depend on each other (contrastive losses, batch statistics), "
                f"it cannot be split. {ADVICE}"
            )
        raise LoopError(
            f"{DOES_NOT_FOLLOW}: {figures}, averaged over {counts[0]:g} and {counts[1]:g}. Samples depend on each other, or n is not the number "
            f"that the loss is averaged over. {ADVICE}"
        )

    def _is_close(self, a: Tensor | float, b: Tensor | float, like: Tensor) -> bool:
        a, b = float(a), float(b)
        tolerance = TOLERANCES.get(str(like.dtype), COARSE_TOLERANCE)
        if self.torch.is_autocast_enabled(like.device.type):
            tolerance = COARSE_TOLERANCE
        return abs(a - b) <= tolerance * max(abs(a), abs(b))

    # -- the model during the test

    def _reject_batch_norm(self) -> None:
        kind = self.torch.nn.modules.batchnorm._BatchNorm
        names = [
            name or type(self.model).__name__
            for name, module in self.model.named_modules()
            if isinstance(module, kind) and (module.training or module.running_mean is None)
        ]
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise LoopError(
                f"this model uses batch normalisation (module {names[0]}{more}): {DOES_NOT_FOLLOW}. {ADVICE}"
            )

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        dropouts = [
            module
            for module in self.model.modules()
            if module.training and "drop" in type(module).__name__.lower() and not list(module.parameters())
        ]
        try:
            for module in dropouts:
                module.training = False
            yield
        finally:
            for module in dropouts:
                module.training = True

    @contextmanager
    def _eval_mode(self) -> Iterator[None]:
        training = [module for module in self.model.modules() if module.training]
        try:
            self.model.eval()
            yield
        finally:
            for module in training:
                module.training = True

    @contextmanager
    def _preserve_buffers(self) -> Iterator[None]:
        before = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        try:
            yield
        finally:
            with self.torch.no_grad():
                for buffer, value in before:
                    buffer.copy_(value)
