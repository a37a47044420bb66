"""The precision that a Loop computes in: the model's own, or autocast to bfloat16 or float16, the latter with a loss scale."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flatout.plan.errors import LoopError

NAMES = ("float32", "bf16", "fp16")
INFINITE = "the scaled gradient was infinite or NaN; the loss scale was made smaller"


class Precision:
    def __init__(self, torch: Any, name: str, device: Any, parameters: list[Any]) -> None:
        if name not in NAMES:
            raise LoopError(f"precision={name!r}: it is one of {', '.join(NAMES)}.")
        narrow = {str(p.dtype) for p in parameters if p.dtype in (torch.float16, torch.bfloat16)}
        if name == "fp16" and "torch.float16" in narrow:
            raise LoopError('precision="fp16" keeps weights in float32 and computes in float16, but parameters of this model are float16 already. '
                            "Leave out model.half().")
        self.torch, self.name, self.device = torch, name, device
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._plain: AbstractContextManager[None] = nullcontext()
        self._stepped = 0
        self._counted = False

    def autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return self._plain
        return self.torch.autocast(self.device.type, dtype=self._dtype)

    def backward(self, loss: Any) -> None:
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()

    def unscale(self, optimizer: Any) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Any) -> str:
        """Why the optimizer did not step, or nothing."""
        if self.scaler is None:
            optimizer.step()
            return ""
        if not self._counted:  # the scaler does not tell whether it has called the optimizer, and its scale is on the device
            self._counted = True
            optimizer.register_step_post_hook(self._count)
        before = self._stepped
        self.scaler.step(optimizer)
        self.scaler.update()
        return "" if self._stepped > before else INFINITE

    def _count(self, *_: Any) -> None:
        self._stepped += 1
