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

MOST_PENDING = 64  # losses being copied from the device


class LossMonitor:
    """``bad`` tells which step had a non-finite loss: at once on a CPU, some steps later on a device."""

    def __init__(self, torch: ModuleType, device: Device) -> None:
        self.torch, self.waits = torch, device.type != "cpu"
        self._cuda = device.type == "cuda"
        self._pending: deque[tuple[int, Any, Any]] = deque()

    def bad(self, index: int, loss: Tensor) -> int | None:
        """The step whose loss is now known to be non-finite: this one or an earlier one.

        None if all are finite.
        """
        if not self.waits:
            return None if math.isfinite(loss.item()) else index
        if self._cuda:
            copy = self.torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
            copy.copy_(loss.detach(), non_blocking=True)
            event = self.torch.cuda.Event()
            event.record(self.torch.cuda.current_stream(loss.device))
            self._pending.append((index, copy, event))
            return self._arrived(everything=len(self._pending) > MOST_PENDING)
        return None  # other devices cannot be queried without synchronising

    def _arrived(self, everything: bool) -> int | None:
        while self._pending and (everything or self._pending[0][2].query()):
            index, copy, event = self._pending.popleft()
            event.synchronize()
            if not math.isfinite(copy.item()):
                return index
        return None


def first_bad_module(torch: ModuleType, model: Module, call: Callable[[], Any]) -> str:
    """Describe where the first non-finite number comes from: a parameter, or the module that made it.

    Runs the forward pass once more.
    """
    wrong = [name for name, parameter in model.named_parameters() if not _finite(parameter)]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"parameter {wrong[0]}{more} is not finite: an earlier update made it so. Lower the learning rate, or check for infinite gradients"
    seen: list[str] = []
    hooks = [
        torch.nn.Module.register_forward_hook(module, _listener(name or type(model).__name__, module, seen))
        for name, module in model.named_modules()
    ]
    try:
        with torch.no_grad():
            call()
    except Exception as error:
        seen.append(f"the forward pass fails when it is repeated ({type(error).__name__})")
    finally:
        for hook in hooks:
            hook.remove()
    return (
        seen[0] if seen else "every module returns finite numbers: look at the loss computation and the batch"
    )


def _listener(name: str, module: Module, seen: list[str]) -> Callable[..., None]:
    def observe(_: object, inputs: object, output: object) -> None:
        if seen or all(map(_finite, tensors_in(output))):
            return
        if not all(map(_finite, tensors_in(inputs))):  # no earlier module made them
            seen.append(f"the inputs of module {name} are not finite: look at the batch")
            return
        seen.append(f"module {name} ({type(module).__name__}) made it from finite inputs")

    return observe


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(tensor.isfinite().all())
