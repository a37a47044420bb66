"""Detect NaN and infinite losses without synchronising the device, and find the module that produced them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.measure.nests import tensors_in

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.nn import Module

MAX_PENDING = 64  # losses being copied from the device


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
            return None if math.isfinite(loss.item()) else index
        if self._cuda:
            copy = self.torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
            copy.copy_(loss.detach(), non_blocking=True)
            event = self.torch.cuda.Event()
            event.record(self.torch.cuda.current_stream(loss.device))
            self._pending.append((index, copy, event))
            return self._check_arrived(wait=len(self._pending) > MAX_PENDING)
        return None  # other devices cannot be queried without synchronising

    def _check_arrived(self, wait: bool) -> int | None:
        while self._pending and (wait or self._pending[0][2].query()):
            index, copy, event = self._pending.popleft()
            event.synchronize()
            if not math.isfinite(copy.item()):
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
    return (
        reasons[0]
        if reasons
        else "every module returns finite numbers: look at the loss computation and the batch"
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
