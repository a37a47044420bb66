"""The compute precision of a Loop, by name.

float32        the dtype of the model
tf32           float32 with matrix products and convolutions in TF32, on GPUs that have it
bf16, fp16     autocast; weights stay in float32. fp16 with a loss scale
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.levers.tf32 import set_matmul_precision
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.optim import Optimizer

LOGGER = logging.getLogger("flatout")
NAMES = ("float32", "tf32", "bf16", "fp16")
SKIP_REASON = "the scaled gradient was infinite or NaN; the loss scale was reduced"


class Precision:
    """``parameters``: the optimizer's."""

    def __init__(self, torch: ModuleType, name: str, device: Device, parameters: list[Any]) -> None:
        if name not in NAMES:
            raise LoopError(f"precision={name!r} is not supported. Use one of {', '.join(NAMES)}.")
        if name == "fp16" and any(p.dtype == torch.float16 for p in parameters):
            raise LoopError(
                'precision="fp16" keeps weights in float32 and computes in float16, but parameters of this model are already float16. '
                "Remove model.half()."
            )
        self.torch, self.name, self.device, self._ledger = torch, name, device, Ledger()
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        if name == "tf32":
            self._enable_tf32()
        self.plain = self._dtype is None  # whether there is neither autocast nor a loss scale
        self._no_autocast: AbstractContextManager[None] = nullcontext()
        self._step_count = 0
        self._counts_steps = False

    def close(self) -> None:
        """Restore torch's flags."""
        self._ledger.restore()

    def state(self) -> dict[str, Any]:
        """The loss scale, for a checkpoint."""
        return {"scaler": self.scaler.state_dict() if self.scaler is not None else None}

    def load_state(self, state: dict[str, Any]) -> None:
        """Call after loading the model and the optimizer. Ignores state that this precision does not use."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return self._no_autocast
        return self.torch.autocast(self.device.type, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def unscale(self, optimizer: Optimizer) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> str:
        """Step the optimizer. Returns why it did not step, or ""."""
        if self.scaler is None:
            optimizer.step()
            return ""
        if not self._counts_steps:  # the scaler does not report whether it called the optimizer
            self._counts_steps = True
            self._ledger.on_restore("step hook", optimizer.register_step_post_hook(self._count).remove)
        before = self._step_count
        self.scaler.step(optimizer)
        self.scaler.update()
        return SKIP_REASON if self._step_count == before else ""

    def _count(self, *_: object) -> None:
        self._step_count += 1

    def _enable_tf32(self) -> None:
        torch, ledger = self.torch, self._ledger
        if self.device.type != "cuda" or torch.cuda.get_device_capability(self.device)[0] < 8:
            LOGGER.warning(
                'precision="tf32" changes nothing here: it needs an NVIDIA GPU of compute capability 8.0 or later, and this is %s',
                self.device,
            )
        set_matmul_precision(torch, "high", ledger)
        ledger.set_flag(torch.backends.cudnn, "allow_tf32", True)  # convolutions
