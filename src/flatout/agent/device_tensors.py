"""Redirects the functions and methods that make or move tensors."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from flatout.agent.device_arguments import DeviceArguments
from flatout.agent.frames import is_users

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device


class TensorRedirection(DeviceArguments):
    """Redirects what makes, moves and describes tensors to the device that the user asked for."""

    def _install_tensors(self) -> None:
        from torch.utils._device import DeviceContext, _device_constructors

        torch, tensor = self.torch, self.torch.Tensor
        makers = {id(function) for function in _device_constructors()} | {id(torch.normal)}
        for owner in (torch, torch.fft, torch.nested):
            for name, value in list(vars(owner).items()):
                if id(value) in makers or (owner is torch and name.endswith("_like") and callable(value)):
                    self._set(owner, name, partial(self._takes, pins=not self.on_host))
        moves = tensor.to  # the unwrapped method
        self._set(tensor, "to", partial(self._takes, at=1))
        for kind in ("cuda", "xpu"):
            self._set(tensor, kind, partial(self._moved, kind, moves))
        for name in [name for name in dir(tensor) if name.startswith("new_")]:
            self._set(tensor, name, partial(self._takes, pins=not self.on_host))
        self._set(tensor, "type", partial(self._takes, at=1, key="dtype", change=self.type_name))
        self.ledger.set(tensor, "is_cuda", self._is_cuda(torch._C.TensorBase.is_cuda), new=True)
        if self.on_host:
            self._set(tensor, "pin_memory", lambda really: lambda tensor, device=None: tensor)
            self._set(tensor, "record_stream", lambda really: lambda tensor, stream: None)
            warnings.filterwarnings(
                "ignore", message=r"'pin_memory' argument is set as true but", category=UserWarning
            )
        # a CPU-only torch does not accept a number
        self._set(torch.nn.Module, "to", partial(self._takes, at=1))
        self._set(DeviceContext, "__init__", partial(self._takes, at=1))
        self._set(torch, "set_default_device", self._default_device)
        self._set(
            torch, "set_default_tensor_type", partial(self._takes, at=0, key="t", change=self.type_name)
        )
        self.ledger.set(torch, "Generator", self._generators(torch.Generator))

    def _moved(self, kind: str, moves: Any, really: Callable[..., Any]) -> Any:
        """Wrap `Tensor.cuda` and similar methods."""
        if kind == self.target.type:
            return lambda tensor, device=None, *args, **kwargs: really(
                tensor, self(kind if device is None else device), *args, **kwargs
            )

        @wraps(really)
        def moved(
            tensor: Tensor,
            device: Device = None,
            non_blocking: bool = False,
            memory_format: object = self.torch.preserve_format,
        ) -> Any:
            return moves(
                tensor,
                self(kind if device is None else device),
                non_blocking=non_blocking,
                memory_format=memory_format,
            )

        return moved

    def _is_cuda(self, really: Callable[..., Any]) -> property:
        """Answer `Tensor.is_cuda`: yes on another accelerator, or if the script would end otherwise."""
        kind = self.target.type

        def is_cuda(tensor: Tensor) -> bool:
            if really.__get__(tensor) or kind == "cuda":
                return bool(really.__get__(tensor))
            frame = sys._getframe(1)
            return is_users(frame.f_code.co_filename) and (
                tensor.device.type == kind if not self.on_host else self.demands.at(frame)
            )

        return property(is_cuda)

    def _default_device(self, really: Callable[..., Any]) -> Any:
        @wraps(really)
        def set_default_device(device: Device) -> None:
            found = self(device)
            # a CPU default would slow down every call
            really(None if self.on_host and found is self.target and found is not device else found)

        return set_default_device

    def _generators(self, really: Any) -> Any:
        """Wrap `torch.Generator`, a C type; the wrapper creates generators of that type."""
        redirected = self

        class Makes(type(really)):  # type: ignore[misc]
            def __call__(cls, device: Device = "cpu") -> Any:
                return really(redirected(device))

            def __instancecheck__(cls, thing: Any) -> bool:
                return isinstance(thing, really)

            def __subclasscheck__(cls, kind: type) -> bool:
                return issubclass(kind, really)

        return Makes("Generator", (really,), {"__module__": "torch", "__doc__": really.__doc__})
