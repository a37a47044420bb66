"""Replaces the devices that a script names in calls of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.cuda_checks import ACCELERATORS, CudaChecks
from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch import device as Device

VISIBLE = "CUDA_VISIBLE_DEVICES"


class DeviceArguments:
    """Replaces devices in arguments.

    ``asked`` replaces every accelerator that the script names. ``tell`` is called for each that differs.
    ``visible``: the value of CUDA_VISIBLE_DEVICES, in which ``asked`` is counted.
    """

    def __init__(
        self, torch: ModuleType, asked: str, visible: str | None, ledger: Ledger, tell: Callable[[str], None]
    ) -> None:
        self.torch, self.asked, self.visible, self.ledger, self.tell = torch, asked, visible, ledger, tell
        self.target = torch.device(asked)
        self.on_host = self.target.type == "cpu"
        # ``chosen``: the script names exactly this device; a device without a number may mean it
        self.named = self.chosen = False
        self.demands = CudaChecks()
        self._known: dict[Any, Any] = {}

    def __call__(self, device: Device) -> Any:
        """Return the device for torch when the script passes ``device``: a device, name or number.

        Non-accelerators stay.
        """
        if type(device) not in (str, int, self.torch.device):
            return device
        if device not in self._known:
            self._known[device] = self._redirected(device)
        return self._known[device]

    def _redirected(self, device: Device) -> Any:
        self.keep_visible()
        kind, _, index = (
            f"{'cuda' if self.on_host else self.target.type}:{device}" if type(device) is int else str(device)
        ).partition(":")
        if kind not in ACCELERATORS:
            return device
        self.named = True
        self.chosen = self.chosen or (kind == self.target.type and index == str(self.target.index))
        if kind == self.target.type and (
            self.target.index is None
            or index == str(self.target.index)
            or (not index and not self.target.index)
        ):
            return device
        if index or not self.chosen:
            name = kind if index.startswith("-") or not index else f"{kind}:{index}"
            self.tell(
                f"the script asks for {name}; --device {self.asked} runs it on {'the CPU' if self.on_host else self.target}"
            )
        return self.target

    def keep_visible(self) -> None:
        """Restore CUDA_VISIBLE_DEVICES.

        Many scripts set it themselves, before they import torch or use a card.
        """
        if os.environ.get(VISIBLE) != self.visible:
            self.ledger.set_item(os.environ, VISIBLE, self.visible or "")
            if self.visible is None:
                del os.environ[VISIBLE]

    def kind(self, name: object) -> Any:
        """Redirect a device type alone: "cuda"."""
        return self(name).type if name in ACCELERATORS and name != self.target.type else name

    def type_name(self, name: object) -> Any:
        """Redirect a tensor type name: "torch.cuda.FloatTensor"."""
        if not self.on_host or not isinstance(name, str) or not name.startswith("torch.cuda."):
            return name
        self("cuda")
        return name.replace("torch.cuda.", "torch.")

    def set(self, owner: object, name: str, change: Callable[[Any], Any]) -> None:
        """Patch an attribute; skip it if this torch lacks it, since then no script can use it."""
        if hasattr(owner, name):
            self.ledger.set(owner, name, change(getattr(owner, name)))

    def takes(
        self,
        really: Callable[..., Any],
        at: int | None = None,
        key: str = "device",
        change: Callable[[Any], Any] | None = None,
        pins: bool = True,
    ) -> Any:
        """Wrap ``really`` to redirect its argument ``key``, by name or at position ``at``.

        Without ``pins`` nothing is pinned.
        """
        change = change or self

        @wraps(really)
        def call(*args: object, **kwargs: object) -> Any:
            if kwargs:
                if kwargs.get(key) is not None:
                    kwargs[key] = change(kwargs[key])
                if not pins:
                    kwargs.pop("pin_memory", None)
            if at is not None and len(args) > at:
                args = (*args[:at], change(args[at]), *args[at + 1 :])
            return really(*args, **kwargs)

        return call
