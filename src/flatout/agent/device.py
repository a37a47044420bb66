"""Runs an unmodified script on the device of `--device` by redirecting the accelerators it names.

`torch.device("cuda")` is a C value, and its comparisons cannot be changed. So everything that *takes* a
device is wrapped: tensor constructors, `Tensor.to` and similar, loaded storages, autocast and GradScaler,
generators, DataParallel, and the functions of `torch.cuda`. A call that names no device costs one more Python
call.

On the CPU, `torch.cuda.is_available()` returns False to the script, so that a script which can train on a CPU
does so. It returns True if the script would otherwise end itself (an assert, a branch that raises or exits).
Libraries always get the true answer.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.bootstrap import AfterImport, say
from flatout.agent.cuda_checks import ACCELERATORS, ASKS
from flatout.agent.device_arguments import VISIBLE, DeviceArguments
from flatout.agent.device_messages import tell_first
from flatout.agent.device_tensors import redirect_tensors
from flatout.agent.frames import is_users
from flatout.agent.host_answers import host_answers, zero
from flatout.agent.ledger import Ledger

if TYPE_CHECKING:
    from torch.nn import Module

OF_A_MODULE = ("memory", "random", "streams")  # submodules of torch.cuda that export the same functions again


def install(asked: str) -> None:
    """At process start, arrange to redirect torch to ``asked`` right after its import."""
    visible = os.environ.get(VISIBLE)
    sys.meta_path.insert(0, AfterImport({"torch": lambda torch: redirect(torch, asked, visible)}))


def redirect(torch: ModuleType, asked: str, visible: str | None) -> None:
    devices = DeviceArguments(torch, asked, visible, Ledger(), tell_first)
    devices.keep_visible()
    redirect_tensors(devices)
    _install_loading(devices)
    _install_types(devices)
    _install_wrappers(devices)
    _install_modules(devices)
    if devices.on_host:
        _install_extensions(devices)
    else:
        atexit.register(_leave, devices, os.getpid())


def _leave(devices: DeviceArguments, pid: int) -> None:
    """At the end, report a script that names no device and so cannot be moved to an accelerator."""
    kind = devices.torch.nn.Parameter
    if (
        os.getpid() == pid
        and not devices.named
        and any(issubclass(type(thing), kind) and thing.grad is not None for thing in gc.get_objects())
    ):
        devices.tell(
            f"the script names no accelerator: it trained on the CPU, and --device {devices.asked} had no effect"
        )


# -- functions with a device argument -----------------------------------------------------------------------


def _install_loading(devices: DeviceArguments) -> None:
    """Redirect every storage of a checkpoint, which passes one function for any `map_location`."""
    torch = devices.torch

    def by_name(location: Any) -> Any:
        name = location.decode("ascii") if isinstance(location, bytes) else location
        return str(devices(name)) if isinstance(name, str) else location

    devices.set(
        torch.serialization,
        "default_restore_location",
        partial(devices.takes, at=1, key="location", change=by_name),
    )
    devices.set(torch.UntypedStorage, "to", devices.takes)  # `cuda` calls this method
    jit = devices.takes(torch.jit.load, at=1, key="map_location")
    devices.ledger.set(
        torch.jit,
        "load",
        wraps(torch.jit.load)(
            lambda f, map_location=None, *args, **kwargs: jit(
                f, "cpu" if map_location is None and devices.on_host else map_location, *args, **kwargs
            )
        ),
    )


def _install_types(devices: DeviceArguments) -> None:
    """Redirect functions with a device type: autocast, GradScaler.

    An explicit dtype stays; CUDA's default becomes the target's.
    """
    torch, kind = devices.torch, devices.kind
    devices.set(
        torch.amp.autocast_mode.autocast,
        "__init__",
        partial(devices.takes, at=1, key="device_type", change=kind),
    )
    devices.set(
        torch.amp.GradScaler,
        "__init__",
        lambda really: wraps(really)(
            lambda scaler, device="cuda", *args, **kwargs: really(scaler, kind(device), *args, **kwargs)
        ),
    )
    if devices.target.type != "cuda":
        devices.set(
            torch.cuda.amp.autocast,
            "__init__",
            lambda really: wraps(really)(
                lambda context, enabled=True, dtype=None, cache_enabled=True: really(
                    context,
                    enabled,
                    torch.get_autocast_dtype(devices.target.type) if dtype is None else dtype,
                    cache_enabled,
                )
            ),
        )
    for name in ("custom_fwd", "custom_bwd", "is_autocast_available"):
        devices.set(
            torch.amp,
            name,
            partial(devices.takes, at=0 if name.startswith("is") else None, key="device_type", change=kind),
        )
    for name in (
        "is_autocast_enabled",
        "get_autocast_dtype",
        "set_autocast_enabled",
        "set_autocast_dtype",
    ):
        devices.set(torch, name, partial(devices.takes, at=0, key="device_type", change=kind))


def _install_wrappers(devices: DeviceArguments) -> None:
    """Restrict DataParallel and similar wrappers to the one device."""
    parallel = devices.torch.nn.parallel
    if devices.target.index is None and not devices.on_host:
        return
    only = None if devices.on_host else [devices.target]

    def replicas(really: Callable[..., Any]) -> Any:
        return wraps(really)(
            lambda wrapper, module, device_ids=None, output_device=None, *args, **kwargs: really(
                wrapper, module, only, None, *args, **kwargs
            )
        )

    def ranks(really: Callable[..., Any]) -> Any:
        return wraps(really)(
            lambda wrapper, module, device_ids=None, output_device=None, *args, **kwargs: really(
                wrapper, module, device_ids and only, None, *args, **kwargs
            )
        )

    def once(really: Callable[..., Any]) -> Any:
        return wraps(really)(
            lambda module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None: (
                really(module, inputs, only, None, dim, module_kwargs)
                if only
                else module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))
            )
        )

    if devices.on_host:
        devices.set(
            sys.modules[parallel.DataParallel.__module__],
            "_get_available_device_type",
            lambda really: lambda: None,
        )
    devices.set(parallel.DataParallel, "__init__", replicas)
    devices.set(parallel.DistributedDataParallel, "__init__", ranks)
    devices.set(parallel, "data_parallel", once)


def _install_extensions(devices: DeviceArguments) -> None:
    """Report built CUDA extensions: they cannot be redirected, and their failure is silent."""

    def built(really: Callable[..., Any]) -> Any:
        @wraps(really)
        def build(*args: object, **kwargs: object) -> Any:
            given = inspect.signature(really).bind(*args, **kwargs).arguments
            sources = given.get("sources") or ()
            if given.get("cuda_sources") or any(
                str(name).endswith(".cu") for name in ([sources] if isinstance(sources, str) else sources)
            ):
                say(
                    f"--device {devices.asked} cannot redirect the CUDA extension {given['name']!r}: its kernels run only on a CUDA device. Use a code "
                    "path of the script without it, or run the script on a machine with a CUDA device"
                )
            return really(*args, **kwargs)

        return build

    def wrap(module: Module) -> None:
        for name in ("load", "load_inline"):
            devices.set(module, name, built)

    name = "torch.utils.cpp_extension"
    if name in sys.modules:
        wrap(sys.modules[name])
    else:
        sys.meta_path.insert(0, AfterImport({name: wrap}))


# -- torch.cuda and other accelerator modules -----------------------------------------------------------


def _install_modules(devices: DeviceArguments) -> None:
    torch, kind, answers = devices.torch, devices.target.type, _answers(devices)
    for name in (*ACCELERATORS, *(("accelerator",) if devices.on_host else ())):
        if name != kind:
            _answer_for(devices, getattr(torch, name), answers)
    if devices.on_host:
        for name in [name for name in dir(torch) if name.endswith("Tensor") and hasattr(torch.cuda, name)]:
            devices.ledger.set(torch.cuda, name, getattr(torch, name))
    elif devices.target.index is not None:
        _answer_by_index(devices, getattr(torch, kind))
    for owner in (
        torch.cuda,
        torch.xpu,
        torch.mps,
        torch.backends.mps,
        *((torch.accelerator,) if devices.on_host else ()),
    ):
        for name in ASKS:
            devices.set(owner, name, partial(_asked, devices, name, of_target=owner is getattr(torch, kind)))


def _answer_for(devices: DeviceArguments, module: ModuleType, answers: dict[str, Any]) -> None:
    owners = [
        module,
        *(part for name in OF_A_MODULE if isinstance(part := getattr(module, name, None), ModuleType)),
    ]
    for name, answer in answers.items():
        really = getattr(module, name, None)
        own = _own(answer, really)
        for owner in owners if really is not None else ():
            if getattr(owner, name, None) is really:
                devices.ledger.set(owner, name, own)
    for part, names in (
        ("nvtx", ("range_push", "range_pop", "range_start", "range_end", "mark")),
        ("profiler", ("start", "stop")),
    ):
        for name in names:
            devices.set(getattr(module, part, None), name, partial(_own, zero))


def _answers(devices: DeviceArguments) -> dict[str, Any]:
    """Return the functions of the target accelerator, or else neutral answers, by name."""
    found = host_answers(devices.torch)
    own = getattr(devices.torch, devices.target.type)
    for name in found if not devices.on_host else ():
        for owner in (own, devices.torch.accelerator):
            if hasattr(owner, name):
                found[name] = _by_index(devices, getattr(owner, name))
                break
    return found


def _answer_by_index(devices: DeviceArguments, module: Module) -> None:
    """On one of several cards, redirect every device number, and calls without a number, to this card."""
    for owner in (module, *(getattr(module, name, None) for name in OF_A_MODULE), devices.torch.accelerator):
        for name, really in list(vars(owner).items()) if owner is not None else ():
            if not name.startswith("_") and (found := _by_index(devices, really)) is not really:
                devices.ledger.set(owner, name, found)
    devices.set(module.device, "__init__", partial(devices.takes, at=1))
    devices.set(module.Stream, "__new__", lambda really: staticmethod(devices.takes(really, at=1)))
    module._lazy_call(partial(module.set_device, devices.target))


def _by_index(devices: DeviceArguments, really: Callable[..., Any]) -> Any:
    """Wrap ``really`` to redirect its argument ``device``, if it has one.

    Its own module means the card that it names.
    """
    names = list(inspect.signature(really).parameters) if inspect.isfunction(really) else []
    key = next((name for name in ("device", "device_index") if name in names), None)
    if key is None:
        return really
    redirected, module = devices.takes(really, at=names.index(key), key=key), f"torch.{devices.target.type}"

    @wraps(really)
    def call(*args: object, **kwargs: object) -> Any:
        return (really if str(sys._getframe(1).f_globals.get("__name__")).startswith(module) else redirected)(
            *args, **kwargs
        )

    return call


def _asked(devices: DeviceArguments, name: str, really: Callable[..., Any], of_target: bool) -> Any:
    """Answer `is_available` and `device_count`: the truth for libraries, one device for the script."""
    counts = name == "device_count"

    @wraps(really)
    def answer(*args: object, **kwargs: object) -> Any:
        devices.keep_visible()
        frame = sys._getframe(1)
        if not is_users(frame.f_code.co_filename) or (
            of_target and (not counts or devices.target.index is None)
        ):
            return really(*args, **kwargs)
        there = (
            not devices.on_host
            or devices.demands.at(frame)
            or (counts and not devices.demands.has_another_way(frame.f_code.co_filename))
        )
        return int(there) if counts else there

    return answer


def _own(answer: Callable[..., Any], really: object) -> Any:
    """Return ``answer`` as a new object: the compiler has rules per function of torch, by identity."""
    if isinstance(answer, type):
        return type(answer.__name__, (answer,), {})

    def own(*args: object, **kwargs: object) -> Any:
        return answer(*args, **kwargs)

    return wraps(really)(own) if callable(really) else own
