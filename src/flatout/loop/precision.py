"""The compute precision of a Loop, by name.

float32        the dtype of the model
tf32           float32 with matrix products and convolutions in TF32, on GPUs that have it
bf16, fp16     autocast; weights stay in float32. fp16 with a loss scale
bf16-master    the model is bfloat16 (or float16), the optimizer has float32 copies of its parameters
fp16-master    (`flatout.loop.masters`); fp16 with a loss scale
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.ledger import Ledger
from flatout.loop.masters import Masters
from flatout.schema.errors import LoopError

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device
    from torch.optim import Optimizer

LOGGER = logging.getLogger("flatout")
NAMES = ("float32", "tf32", "bf16", "fp16", "bf16-master", "fp16-master")
INFINITE = "the scaled gradient was infinite or NaN; the loss scale was reduced"


class Precision:
    """``parameters`` are the optimizer's; with master weights they become the copies.

    ``together``: ranks exchange gradients inside the backward pass.
    """

    def __init__(
        self,
        torch: ModuleType,
        name: str,
        optimizer: Optimizer,
        device: Device,
        parameters: list[Any],
        together: bool = False,
    ) -> None:
        if name not in NAMES:
            raise LoopError(f"precision={name!r} is not supported. Use one of {', '.join(NAMES)}.")
        narrow = {str(p.dtype) for p in parameters if p.dtype in (torch.float16, torch.bfloat16)}
        if name == "fp16" and "torch.float16" in narrow:
            raise LoopError(
                'precision="fp16" keeps weights in float32 and computes in float16, but parameters of this model are already float16. '
                'Remove model.half(), or use precision="fp16-master".'
            )
        self.torch, self.name, self.device, self._ledger = torch, name, device, Ledger()
        self._dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(device.type) if name.startswith("fp16") else None
        self.masters: Masters | None = None
        if name == "tf32":
            self._multiply_in_tf32()
        if name.endswith("-master"):
            self.masters = Masters.made(
                torch,
                optimizer,
                parameters,
                torch.float16 if self.scaler is not None else torch.bfloat16,
                self.name,
                together,
            )
            self._ledger.call("master weights", self.masters.close)
        # Whether there is no autocast, no loss scale and no master copy. Read in every step.
        self.plain = self._dtype is None and self.scaler is None and self.masters is None
        self._nothing: AbstractContextManager[None] = nullcontext()
        self._stepped = 0
        self._counted = False

    def close(self) -> None:
        """Restore torch's flags and the optimizer."""
        self._ledger.restore()
        self.masters = None
        self.plain = self._dtype is None and self.scaler is None

    def state(self) -> dict[str, Any]:
        """The loss scale and the float32 copies of the weights, for a checkpoint."""
        return {
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "masters": list(self.masters.copies()) if self.masters is not None else None,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Call after loading the model and the optimizer. Ignores state that this precision does not use."""
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        if self.masters is not None and state["masters"] is not None:
            self.masters.take(state["masters"])

    def autocast(self) -> AbstractContextManager[Any]:
        if self._dtype is None:
            return self._nothing
        return self.torch.autocast(self.device.type, dtype=self._dtype)

    def backward(self, loss: Tensor) -> None:
        if self.scaler is None:
            loss.backward()
        else:
            self.scaler.scale(loss).backward()
        if self.masters is not None:
            self.masters.collect_early()

    def unscale(self, optimizer: Optimizer) -> None:
        if self.masters is not None:
            self.masters.collect()
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def step(self, optimizer: Optimizer) -> str:
        """Step the optimizer. Returns why it did not step, or ""."""
        if self.masters is not None:
            self.masters.collect()
        if self.scaler is None:
            optimizer.step()
        else:
            if not self._counted:  # the scaler does not report whether it called the optimizer
                self._counted = True
                self._ledger.call("step hook", optimizer.register_step_post_hook(self._count).remove)
            before = self._stepped
            self.scaler.step(optimizer)
            self.scaler.update()
            if self._stepped == before:
                return INFINITE
        if self.masters is not None:
            self.masters.hand_back()
        return ""

    def _count(self, *_: object) -> None:
        self._stepped += 1

    def _multiply_in_tf32(self) -> None:
        """Use the older flags, which keep both families consistent; cuDNN has one of its own."""
        torch, ledger = self.torch, self._ledger
        if self.device.type != "cuda" or torch.cuda.get_device_capability(self.device)[0] < 8:
            LOGGER.warning(
                'precision="tf32" changes nothing here: it needs an NVIDIA GPU of compute capability 8.0 or later, and this is %s',
                self.device,
            )
        for owner in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            ledger.set_flag(
                owner, "fp32_precision", owner.fp32_precision
            )  # restored last: setting "highest" leaves "ieee"
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        ledger.call("torch.set_float32_matmul_precision", lambda: torch.set_float32_matmul_precision(before))
        ledger.set_flag(torch.backends.cudnn, "allow_tf32", True)
