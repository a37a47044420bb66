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


def redirect_tensors(devices: DeviceArguments) -> None:
    """Redirect what makes, moves and describes tensors."""
    from torch.utils._device import DeviceContext, _device_constructors

    torch, tensor = devices.torch, devices.torch.Tensor
    makers = {id(function) for function in _device_constructors()} | {id(torch.normal)}
    for owner in (torch, torch.fft, torch.nested):
        for name, value in list(vars(owner).items()):
            if id(value) in makers or (owner is torch and name.endswith("_like") and callable(value)):
                devices.set(owner, name, partial(devices.takes, pins=not devices.on_host))
    moves = tensor.to  # the unwrapped method
    devices.set(tensor, "to", partial(devices.takes, at=1))
    for kind in ("cuda", "xpu"):
        devices.set(tensor, kind, partial(_moved, devices, kind, moves))
    for name in [name for name in dir(tensor) if name.startswith("new_")]:
        devices.set(tensor, name, partial(devices.takes, pins=not devices.on_host))
    devices.set(tensor, "type", partial(devices.takes, at=1, key="dtype", change=devices.type_name))
    devices.ledger.set(tensor, "is_cuda", _is_cuda(devices, torch._C.TensorBase.is_cuda), new=True)
    if devices.on_host:
        devices.set(tensor, "pin_memory", lambda really: lambda tensor, device=None: tensor)
        devices.set(tensor, "record_stream", lambda really: lambda tensor, stream: None)
        warnings.filterwarnings(
            "ignore", message=r"'pin_memory' argument is set as true but", category=UserWarning
        )
    # a CPU-only torch does not accept a number
    devices.set(torch.nn.Module, "to", partial(devices.takes, at=1))
    devices.set(DeviceContext, "__init__", partial(devices.takes, at=1))
    devices.set(torch, "set_default_device", partial(_default_device, devices))
    devices.set(
        torch, "set_default_tensor_type", partial(devices.takes, at=0, key="t", change=devices.type_name)
    )
    devices.ledger.set(torch, "Generator", _generators(devices, torch.Generator))


def _moved(devices: DeviceArguments, kind: str, moves: Callable[..., Any], really: Callable[..., Any]) -> Any:
    """Wrap `Tensor.cuda` and similar methods."""
    if kind == devices.target.type:
        return lambda tensor, device=None, *args, **kwargs: really(
            tensor, devices(kind if device is None else device), *args, **kwargs
        )

    @wraps(really)
    def moved(
        tensor: Tensor,
        device: Device = None,
        non_blocking: bool = False,
        memory_format: object = devices.torch.preserve_format,
    ) -> Any:
        return moves(
            tensor,
            devices(kind if device is None else device),
            non_blocking=non_blocking,
            memory_format=memory_format,
        )

    return moved


def _is_cuda(devices: DeviceArguments, really: Callable[..., Any]) -> property:
    """Answer `Tensor.is_cuda`: yes on another accelerator, or if the script would end otherwise."""
    kind = devices.target.type

    def is_cuda(tensor: Tensor) -> bool:
        if really.__get__(tensor) or kind == "cuda":
            return bool(really.__get__(tensor))
        frame = sys._getframe(1)
        return is_users(frame.f_code.co_filename) and (
            tensor.device.type == kind if not devices.on_host else devices.demands.at(frame)
        )

    return property(is_cuda)


def _default_device(devices: DeviceArguments, really: Callable[..., Any]) -> Any:
    @wraps(really)
    def set_default_device(device: Device) -> None:
        found = devices(device)
        # a CPU default would slow down every call
        really(None if devices.on_host and found is devices.target and found is not device else found)

    return set_default_device


def _generators(devices: DeviceArguments, really: type) -> Any:
    """Wrap `torch.Generator`, a C type; the wrapper creates generators of that type."""

    class Makes(type(really)):  # type: ignore[misc]
        def __call__(cls, device: Device = "cpu") -> Any:
            return really(devices(device))

        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, really)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, really)

    return Makes("Generator", (really,), {"__module__": "torch", "__doc__": really.__doc__})
