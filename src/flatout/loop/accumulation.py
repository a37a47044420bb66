"""Accumulate the gradient of an effective batch from its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.batches import split
from flatout.loop.memory import preserve_random_state
from flatout.loop.precision import Precision
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel


# Determine how the loss of a batch follows from the losses of its parts: mean, sum, or not at all.
#
# An accumulated gradient equals the whole batch's only if the loss is a mean or a sum over independent samples.
# The first batch to be split tests this: it compares the loss of the whole with the losses of two uneven parts.
# The test runs without gradients and restores the random state and all buffers. Batch normalisation and losses
# between samples (contrastive ones) do not add up and are rejected with an error that says why.

MEAN, SUM = "mean", "sum"
# relative, of a loss; other dtypes count as bfloat16
TOLERANCES = {"torch.float64": 1e-9, "torch.float32": 1e-4}
COARSE_TOLERANCE = 3e-2
DOES_NOT_FOLLOW = "the loss of a batch does not follow from the losses of its parts"
ADVICE = (
    "Train with the loader's own batches (remove effective_batch and micro_batch), set the batch size in the loader, or use "
    "allow_inexact=True to accept the gradient of another loss."
)


@dataclass(frozen=True)
class LossResult:
    """The result of ``loss_fn``: the loss, the number it is averaged over and further values by name.

    ``count`` is None for a mean over samples."""

    loss: Tensor
    count: Tensor | float | None = None
    values: dict[str, Any] | None = None


def parse_loss(returned: object) -> LossResult:
    """Parse ``loss``, ``(loss, n)``, ``(loss, values)`` or ``(loss, n, values)``.

    Raises LoopError for anything else."""
    if hasattr(returned, "backward"):
        return LossResult(returned)
    if isinstance(returned, tuple) and returned and hasattr(returned[0], "backward") and len(returned) <= 3:
        rest = list(returned[1:])
        values = rest.pop() if rest and isinstance(rest[-1], dict) else None
        if len(rest) <= 1 and not any(isinstance(value, (dict, str)) for value in rest):
            return LossResult(returned[0], rest[0] if rest else None, values)
    description = f"a {type(returned).__name__}"
    if isinstance(returned, tuple):
        description += f" of {', '.join(type(value).__name__ for value in returned)}"
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

        Raises LoopError if the loss of a batch does not follow from those of its parts."""
        self._reject_batch_norm()
        if size < 2:
            raise LoopError(
                "the loader gives one sample at a time, so whether the loss is a mean or a sum over samples cannot be tested. "
                'Pass reduction="mean" or reduction="sum".'
            )
        # one split may match by chance
        splits = [[first, size - first] for first in sorted({1, max(1, size // 3)})]
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
        for sizes in splits:
            reduction = self._compare(whole, [self._loss(part) for part in split(batch, sizes)], sizes)
        return reduction

    def _compare(self, whole: LossResult, parts: list[LossResult], sizes: list[int]) -> str:
        counts = [
            float(size if part.count is None else part.count) for part, size in zip(parts, sizes, strict=True)
        ]
        # a mean over nothing counts 0
        losses = [float(part.loss) if count else 0.0 for part, count in zip(parts, counts, strict=True)]
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


COMBINE_MODES = ("mean", "sum", "max", "min", "last")  # ways to combine the values of micro-batches


class Accumulation:
    """Accumulates one step. Call ``add`` for each micro-batch, in order; it runs the backward pass.

    Each micro-batch is weighted by the number that its loss is averaged over. The total number of tokens is
    known only at the end. Gradients are therefore computed for an estimate of it and corrected once, on the
    device. With a mean over samples nothing needs correction.

    ``summed``: losses are sums, so every weight is 1. ``parallel``: the DistributedDataParallel whose ranks
    exchange gradients inside the last backward pass. Gradients must then be correct before it, and a rank
    whose last micro-batch counts nothing must still contribute."""

    def __init__(
        self,
        torch: ModuleType,
        precision: Precision,
        summed: bool,
        samples: int,
        parallel: DistributedDataParallel | None = None,
    ) -> None:
        self.torch, self.precision, self.summed, self.samples = torch, precision, summed, samples
        self.parallel = parallel
        self._estimate: Any = None
        self._losses: list[Any] = []
        self._weights: list[Any] = []
        self._values: list[tuple[dict[str, Any], int]] = []

    def add(self, result: LossResult, size: int, last: bool) -> None:
        weight: Any = 1.0 if self.summed else float(size)
        has_count = result.count is not None and not self.summed
        if has_count:
            weight = _as_scalar(self.torch, result.count, result.loss)
        self._values.append((detach_values(result.values), size))
        parallel = self.parallel if last and self._weights else None
        if _is_zero(weight) and (self._estimate is not None or not last):
            if parallel is not None:
                self._exchange_zero(parallel)
            return  # no token counts here: the loss is 0 / 0 and contributes nothing to the whole batch
        if parallel is not None and has_count:
            self._correct(_trainable(parallel), sum(self._weights) + weight)
        if self._estimate is None:
            total = 1.0 if self.summed else float(self.samples)
            self._estimate = weight * (self.samples / size) if has_count else total
        self.precision.backward(result.loss * (weight / self._estimate))
        self._losses.append(result.loss.detach())
        self._weights.append(weight)

    def loss(self, parameters: list[Any]) -> Any:
        """The loss of the whole effective batch. Call it last: it corrects gradients made for an estimate."""
        total = 1.0 if self.summed else sum(self._weights)
        if hasattr(total, "dtype"):
            self._correct(parameters, total)
        return sum(loss * (weight / total) for loss, weight in zip(self._losses, self._weights, strict=True))

    def _exchange_zero(self, parallel: DistributedDataParallel) -> None:
        if parallel.find_unused_parameters or parallel.static_graph:
            raise LoopError(
                "the last micro-batch of a step counts nothing (n is 0), and DistributedDataParallel with find_unused_parameters or "
                "static_graph cannot exchange gradients without it. Use a larger micro_batch."
            )
        parameters = _trainable(parallel)
        self._correct(parameters, sum(self._weights))
        sum(p.sum() * 0 for p in parameters).backward()

    def _correct(self, parameters: list[Any], total: object) -> None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        if gradients:
            with self.torch.no_grad():
                self.torch._foreach_mul_(gradients, (self._estimate / total).to(gradients[0].dtype))
        self._estimate = total

    def values(self, modes: Mapping[str, str]) -> dict[str, Any]:
        """Combine the further values of all micro-batches.

        ``modes``: by name; the default is the mean weighted by samples."""
        combined = {}
        for name in self._values[0][0]:
            parts, sizes = [values[name] for values, _ in self._values], [size for _, size in self._values]
            match modes.get(name, "mean"):
                case "mean":
                    weighted = sum(value * size for value, size in zip(parts, sizes, strict=True))
                    combined[name] = weighted / sum(sizes)
                case "sum":
                    combined[name] = sum(parts)
                case "last":
                    combined[name] = parts[-1]
                case mode:
                    stacked = self.torch.stack([self.torch.as_tensor(value) for value in parts])
                    combined[name] = stacked.max() if mode == "max" else stacked.min()
        return combined


def _trainable(parallel: DistributedDataParallel) -> list[Any]:
    return [p for p in parallel.module.parameters() if p.requires_grad]


def detach_values(values: Mapping[str, Any] | None) -> dict[str, Any]:
    items = (values or {}).items()
    return {name: value.detach() if hasattr(value, "detach") else value for name, value in items}


def _is_zero(weight: Tensor) -> bool:
    """Whether a weight is known to be 0 without waiting for a device."""
    return (not hasattr(weight, "device") or weight.device.type == "cpu") and float(weight) == 0.0


def _as_scalar(torch: ModuleType, count: Tensor | float, loss: Tensor) -> Any:
    """The number that a loss is averaged over, as a tensor on the loss's device.

    Reading it as a number would synchronise."""
    dtype = torch.promote_types(loss.dtype, torch.float32)
    if hasattr(count, "detach"):
        return count.detach().to(device=loss.device, dtype=dtype)
    return torch.tensor(float(count), device=loss.device, dtype=dtype)
