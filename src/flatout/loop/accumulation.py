"""Accumulate the gradient of an effective batch from its micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.precision import Precision
from flatout.loop.reduction import LossResult
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

COMBINE_MODES = ("mean", "sum", "max", "min", "last")  # ways to combine the values of micro-batches


class Accumulation:
    """Accumulates one step. Call ``add`` for each micro-batch, in order; it runs the backward pass.

    Each micro-batch is weighted by the number that its loss is averaged over. The total number of tokens is
    known only at the end. Gradients are therefore computed for an estimate of it and corrected once, on the
    device. With a mean over samples nothing needs correction.

    ``summed``: losses are sums, so every weight is 1. ``parallel``: the DistributedDataParallel whose ranks
    exchange gradients inside the last backward pass. Gradients must then be correct before it, and a rank
    whose last micro-batch counts nothing must still contribute.
    """

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
        """The loss of the whole effective batch.

        Call it last: it corrects gradients made for an estimate.
        """
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

        ``modes``: by name; the default is the mean weighted by samples.
        """
        combined = {}
        for name in self._values[0][0]:
            parts, sizes = [values[name] for values, _ in self._values], [size for _, size in self._values]
            match modes.get(name, "mean"):
                case "mean":
                    combined[name] = sum(
                        value * size for value, size in zip(parts, sizes, strict=True)
                    ) / sum(sizes)
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
    return (
        {name: value.detach() if hasattr(value, "detach") else value for name, value in values.items()}
        if values
        else {}
    )


def _is_zero(weight: Tensor) -> bool:
    """Whether a weight is known to be 0 without waiting for a device."""
    return (not hasattr(weight, "device") or weight.device.type == "cpu") and float(weight) == 0.0


def _as_scalar(torch: ModuleType, count: Tensor | float, loss: Tensor) -> Any:
    """The number that a loss is averaged over, as a tensor on the loss's device.

    Reading it as a number would synchronise.
    """
    dtype = torch.promote_types(loss.dtype, torch.float32)
    if hasattr(count, "detach"):
        return count.detach().to(device=loss.device, dtype=dtype)
    return torch.tensor(float(count), device=loss.device, dtype=dtype)
