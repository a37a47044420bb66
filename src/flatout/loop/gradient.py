"""Compute the gradient of one effective batch into ``.grad``.

A batch that fits is one forward and one backward pass, as in a plain loop. A batch that does not fit, or an
effective batch of several, is accumulated from micro-batches. If memory runs out, the step restarts with the
same random state in smaller micro-batches. A NaN or infinite loss is detected without synchronising the
device, and traced to the module that produced it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.accumulation import MEAN, SUM, Accumulation, ReductionTest, detach_values, parse_loss
from flatout.loop.batches import move, split
from flatout.loop.memory import SMALLER, MicroBatches, OutOfMemory, RandomState, free_memory, is_out_of_memory
from flatout.loop.precision import Precision
from flatout.measure.nests import tensors_in
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.nn import Module
    from torch.optim import Optimizer

RNG_CHECK_STEPS = 8  # the first steps, which detect the generators that a step draws from
RNG_CHECK_INTERVAL = 64  # if none drew, check one step in this many: dropout may be enabled later

MAX_PENDING = 64  # losses being copied from the device
Window = list[tuple[Any, int]]  # the batches of one effective batch, each with its number of samples


class LossMonitor:
    """``non_finite_step`` tells which step had a non-finite loss: at once on a CPU, some steps later on a device."""

    def __init__(self, torch: ModuleType, device: Device) -> None:
        self.torch, self.is_async = torch, device.type != "cpu"
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[int, Any, Any]] = deque()

    def non_finite_step(self, index: int, loss: Tensor) -> int | None:
        """The step whose loss is now known to be non-finite: this one or an earlier one.

        None if all are finite."""
        if not self.is_async:
            return None if isfinite(loss.item()) else index
        if not self._cuda:
            return None  # other devices cannot be queried without synchronising
        copy = self.torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
        copy.copy_(loss.detach(), non_blocking=True)
        event = self.torch.cuda.Event()
        event.record(self.torch.cuda.current_stream(loss.device))
        self._pending.append((index, copy, event))
        wait = len(self._pending) > MAX_PENDING
        while self._pending and (wait or self._pending[0][2].query()):
            index, copy, event = self._pending.popleft()
            event.synchronize()
            if not isfinite(copy.item()):
                return index
        return None


def find_non_finite_source(torch: ModuleType, model: Module, call: Callable[[], Any]) -> str:
    """Describe where the first non-finite number comes from: a parameter, or the module that made it.

    Runs the forward pass once more."""
    parameters = [name for name, parameter in model.named_parameters() if not _is_finite(parameter)]
    if parameters:
        more = f" and {len(parameters) - 1} more" if len(parameters) > 1 else ""
        return f"parameter {parameters[0]}{more} is not finite: an earlier update made it so. Lower the learning rate, or check for infinite gradients"
    reasons: list[str] = []
    hooks = [
        torch.nn.Module.register_forward_hook(
            module, _output_hook(name or type(model).__name__, module, reasons)
        )
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            call()
    except Exception as error:
        reasons.append(f"the forward pass fails when it is repeated ({type(error).__name__})")
    finally:
        for hook in hooks:
            hook.remove()
    return next(
        iter(reasons), "every module returns finite numbers: look at the loss computation and the batch"
    )


def _output_hook(name: str, module: Module, reasons: list[str]) -> Callable[..., None]:
    def observe(_: object, inputs: object, output: object) -> None:
        if reasons or all(map(_is_finite, tensors_in(output))):
            return
        if not all(map(_is_finite, tensors_in(inputs))):  # no earlier module made them
            reasons.append(f"the inputs of module {name} are not finite: look at the batch")
            return
        reasons.append(f"module {name} ({type(module).__name__}) made it from finite inputs")

    return observe


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())


@dataclass(frozen=True)
class Training:
    """What a Loop trains with. ``local_model``: the model as one rank may call it without the others.

    ``parameters``: the optimizer's."""

    torch: ModuleType
    model: Module
    local_model: Module
    optimizer: Optimizer
    loss_fn: Callable[[Any, Any], Any]
    parameters: list[Any]
    device: Device
    precision: Precision
    ranks: int  # that train together


class Gradient:
    """``reduction`` is "mean" or "sum", or None until tested.

    ``loss_monitor`` is None if NaN does not stop the loop."""

    def __init__(
        self,
        training: Training,
        micro_batches: MicroBatches,
        metrics: Mapping[str, str],
        reduction: str | None,
        allow_inexact: bool,
        loss_monitor: LossMonitor | None,
    ) -> None:
        self.training, self.micro_batches, self.metrics = training, micro_batches, metrics
        self.reduction, self.allow_inexact, self._loss_monitor = reduction, allow_inexact, loss_monitor
        self._tensor = training.torch.Tensor
        self._reads_losses = loss_monitor is not None and not loss_monitor.is_async
        self._parallel = training.model if training.model is not training.local_model else None
        self._moves_batches = training.device.type != "cpu"
        self._uses_torch_rng = self._uses_other_rng = False  # from torch's generators, from `random` or numpy

    def compute(self, index: int, window: Window, samples: int) -> tuple[Any, int, dict[str, Any]]:
        """The loss of the effective batch, the number of micro-batches and further values.

        Raises LoopError."""
        training = self.training
        optimizer = training.optimizer
        checks_rng = index < RNG_CHECK_STEPS
        state = None
        if self._uses_torch_rng or self._uses_other_rng or checks_rng or not index % RNG_CHECK_INTERVAL:
            state = RandomState(training.torch, training.device, others=checks_rng or self._uses_other_rng)
        while True:
            optimizer.zero_grad(set_to_none=True)
            try:
                limit = self.micro_batches.limit
                fits = len(window) == 1 and (limit is None or window[0][1] <= limit)
                if fits:
                    result = self._compute_whole(index, window[0][0])
                else:
                    result = self._accumulate(index, window, samples)
                if state is not None and not self._uses_torch_rng:
                    self._uses_torch_rng = state.has_changed()
                break
            except Exception as error:
                if not is_out_of_memory(training.torch, error):
                    raise
                failed = OutOfMemory.from_error(error, self.micro_batches.largest(window))
            # Outside the except block, so that the frames that hold the step's tensors are freed.
            optimizer.zero_grad(set_to_none=True)
            free_memory(training.torch, training.device)
            self._shrink(failed, window)
            if state is not None:
                state.restore()
        if checks_rng and state is not None:
            self._uses_other_rng |= state.others_changed()
        return result

    def state(self) -> dict[str, Any]:
        """The detected reduction and generators, for a checkpoint."""
        return {
            "reduction": self.reduction,
            "draws": self._uses_torch_rng,
            "draws_elsewhere": self._uses_other_rng,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.reduction = state["reduction"] if self.reduction is None else self.reduction
        self._uses_torch_rng, self._uses_other_rng = state["draws"], state["draws_elsewhere"]

    def _accumulate(self, index: int, window: Window, samples: int) -> tuple[Any, int, dict[str, Any]]:
        self.detect_reduction(window)
        training, sizes = self.training, self.micro_batches.sizes
        parts = [
            pair
            for batch, batch_size in window
            for pair in zip(split(batch, sizes(batch_size)), sizes(batch_size), strict=True)
        ]
        accumulation = Accumulation(
            training.torch, training.precision, self.reduction == SUM, samples, self._parallel
        )
        for i, (part, size) in enumerate(parts):
            with self._no_sync() if i < len(parts) - 1 else nullcontext():
                result = parse_loss(self._loss_of(self._on_device(part), training.model))
                if self._loss_monitor is not None and result.count is None:
                    self._stop_if_not_finite(self._loss_monitor, index, result.loss, part)
                accumulation.add(result, size, last=i == len(parts) - 1)
        return accumulation.loss(training.parameters), len(parts), accumulation.values(self.metrics)

    def _compute_whole(self, index: int, batch: object) -> tuple[Any, int, dict[str, Any]]:
        """One forward and backward pass as in a plain loop.

        This is the hot path: call nothing unnecessary."""
        training, plain = self.training, self.training.precision.plain
        if self._moves_batches:
            batch = self._on_device(batch)
        returned = training.loss_fn(training.model, batch) if plain else self._loss_of(batch, training.model)
        if type(returned) is self._tensor:
            loss, values = returned, {}
        else:
            result = parse_loss(returned)
            loss, values = result.loss, detach_values(result.values)
        if self._loss_monitor is not None and not (self._reads_losses and isfinite(loss.item())):
            self._stop_if_not_finite(self._loss_monitor, index, loss, batch)
        if plain:
            loss.backward()
        else:
            training.precision.backward(loss)
        return loss.detach(), 1, values

    def _loss_of(self, batch: object, model: Module) -> Any:
        with self.training.precision.autocast():
            return self.training.loss_fn(model, batch)

    def _loss_on_this_rank(self, batch: object) -> Any:
        return self._loss_of(self._on_device(batch), self.training.local_model)

    def _on_device(self, batch: object) -> Any:
        return move(batch, self.training.device) if self._moves_batches else batch

    def _no_sync(self) -> Any:
        no_sync = getattr(self.training.model, "no_sync", None)
        return no_sync() if no_sync is not None else nullcontext()

    def _stop_if_not_finite(self, loss_monitor: LossMonitor, index: int, loss: Tensor, batch: object) -> None:
        step = loss_monitor.non_finite_step(index, loss)
        if step is None:
            return
        is_current = step == index
        delayed = f"the loss of step {step} was not finite (detected {index - step} steps later)"
        what = f"the loss of step {step} is {float(loss.detach())}" if is_current else delayed
        where = find_non_finite_source(
            self.training.torch, self.training.local_model, lambda: self._loss_on_this_rank(batch)
        )
        consequence = "The weights may be corrupt: resume from your last checkpoint."
        if is_current:
            consequence = "The weights are those before this step."
        raise LoopError(f'{what}: {where}. {consequence} on_nan="ignore" continues.')

    # -- what the first steps determine

    def detect_reduction(self, window: Window) -> None:
        """Test once how a batch can be split. Raises LoopError if it cannot."""
        if self.reduction is not None:
            return
        if self.allow_inexact:
            self.reduction = MEAN
            return
        batch, size = window[0]
        self.reduction = ReductionTest(
            self.training.torch, self.training.local_model, self._loss_on_this_rank
        ).run(batch, size)

    def _shrink(self, failed: OutOfMemory, window: Window) -> None:
        if failed.size <= 1:
            raise LoopError(f"out of memory with a single sample: {failed.message}. {SMALLER}") from None
        if self.training.ranks > 1:
            raise LoopError(
                f"out of memory with {failed.size} samples ({failed.message}). With several ranks the step cannot be repeated: the others "
                f"wait inside the exchange of gradients. Use smaller micro-batches: micro_batch={failed.size // 2}."
            )
        if self.reduction is None:
            try:
                self.detect_reduction(list(_two_samples(window)))
            except LoopError as refusal:
                raise LoopError(
                    f"out of memory with {failed.size} samples ({failed.message}). Smaller micro-batches would change the gradient: "
                    f"{refusal}"
                ) from None
        self.micro_batches.shrink(failed.size)


def _two_samples(window: Window) -> Iterator[tuple[Any, int]]:
    """Two samples, which fit into memory when a batch does not."""
    batch, size = window[0]
    count = min(size, 2)
    yield (split(batch, [count, size - count])[0] if size > count else batch), count
