"""Runs an unmodified script on the CPU under `--device cpu` by redirecting the accelerators that it names.

`torch.device("cuda")` is a C value, and its comparisons cannot be changed. So everything that *takes* a device
is wrapped: tensor constructors, `Tensor.to` and similar, loaded storages, autocast and GradScaler, generators,
DataParallel. `torch.cuda` gets the answers of `host_answers.py`. A call
that takes no device costs nothing.

`torch.cuda.is_available()` returns False to the script, so that a script which can train on a CPU does so. It
returns True in an assert, and in a condition whose branch raises or exits. Libraries always get the true answer.
"""

from __future__ import annotations

import atexit
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial, wraps
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.bootstrap import AfterImport, notify
from flatout.agent.frames import is_user_file
from flatout.agent.host_answers import host_answers, zero
from flatout.agent.ledger import Ledger
from flatout.job.claims import REPORT, claim
from flatout.job.rank_environment import rank_number

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]
ACCELERATORS = ("cuda", "xpu", "mps")
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
SUBMODULES = ("memory", "random", "streams")  # submodules of torch.cuda that export the same functions again
WOULD_END = re.compile(
    r"assert (?!not\b)"
    r"|if (?:not |.*(?:== 0|< 1|== False|is False)).*:\s*(?:print\(.*\)\s*)?(?:raise\b|(?:sys\.|os\._)?exit\b|quit\b)"
)


def install() -> None:
    """At process start, arrange to redirect torch to the CPU right after its import."""
    sys.meta_path.insert(0, AfterImport({"torch": redirect}))


def redirect(torch: ModuleType) -> None:
    devices = DeviceArguments(torch, Ledger(), report_once)
    devices.hide_cards()
    _redirect_tensors(devices)
    _redirect_types(devices)
    _redirect_wrappers(devices)
    _redirect_modules(devices)


def report_once(sentence: str) -> None:
    """Print a line once for all processes of a run that live at the same time."""
    reports = os.environ.get("FLATOUT_CRASH_REPORTS")
    if rank_number() == 0 and reports is not None and claim(path := f"{reports}.device{REPORT}"):
        notify(sentence)
        atexit.register(_remove, path, os.getpid())


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid and os.path.exists(path):
        os.unlink(path)


class DeviceArguments:
    """Replaces accelerators in arguments by the CPU; ``report`` is called for each."""

    def __init__(self, torch: ModuleType, ledger: Ledger, report: Callable[[str], None]) -> None:
        self.torch, self.ledger, self.report = torch, ledger, report
        self.host = torch.device("cpu")
        self._redirected_devices: dict[Any, Any] = {}

    def __call__(self, device: Any) -> Any:
        """Return the device for torch when the script passes ``device``: a device, name or number."""
        if type(device) not in (str, int, self.torch.device):
            return device
        if device not in self._redirected_devices:
            self._redirected_devices[device] = self._redirected(device)
        return self._redirected_devices[device]

    def _redirected(self, device: Any) -> Any:
        self.hide_cards()
        kind, _, index = (f"cuda:{device}" if type(device) is int else str(device)).partition(":")
        if kind not in ACCELERATORS:
            return device
        name = f"{kind}:{index}" if index and not index.startswith("-") else kind
        self.report(f"the script asks for {name}; --device cpu runs it on the CPU")
        return self.host

    def hide_cards(self) -> None:
        """Restore CUDA_VISIBLE_DEVICES, which many scripts set themselves: a forgotten call must not use a card."""
        if os.environ.get(VISIBLE_DEVICES) != "":
            self.ledger.set_item(os.environ, VISIBLE_DEVICES, "")

    def kind(self, name: Any) -> Any:
        return self(name).type if name in ACCELERATORS else name

    def type_name(self, name: object) -> Any:
        if not isinstance(name, str) or not name.startswith("torch.cuda."):
            return name
        self("cuda")
        return name.replace("torch.cuda.", "torch.")

    def patch(self, owner: object, name: str, change: Callable[[Any], Any]) -> None:
        """Patch an attribute; skip it if this torch lacks it, since then no script can use it."""
        if hasattr(owner, name):
            self.ledger.set(owner, name, change(getattr(owner, name)))

    def wrap_argument(
        self,
        original: Function,
        position: int | None = None,
        name: str = "device",
        change: Callable[[Any], Any] | None = None,
    ) -> Any:
        """Wrap ``original`` to redirect its argument ``name``, by name or at position ``position``; nothing is pinned."""
        change = change or self

        @wraps(original)
        def call(*args: object, **kwargs: object) -> Any:
            if kwargs:
                if kwargs.get(name) is not None:
                    kwargs[name] = change(kwargs[name])
                kwargs.pop("pin_memory", None)
            if position is not None and len(args) > position:
                args = (*args[:position], change(args[position]), *args[position + 1 :])
            return original(*args, **kwargs)

        return call


def would_end(frame: FrameType) -> bool:
    """Whether the script ends at this line, or at the next, if the answer is no."""
    file, line = frame.f_code.co_filename, frame.f_lineno
    return would_end_at([linecache.getline(file, line + more) for more in range(3)])


def would_end_at(lines: list[str]) -> bool:
    return WOULD_END.match(" ".join(line.strip() for line in lines)) is not None


# -- functions with a device argument


def _redirect_tensors(devices: DeviceArguments) -> None:
    from torch.utils._device import DeviceContext, _device_constructors

    torch, tensor, wrap_argument = devices.torch, devices.torch.Tensor, devices.wrap_argument
    makers = {id(function) for function in _device_constructors()} | {id(torch.normal)}
    for owner in (torch, torch.fft, torch.nested):
        for name, value in list(vars(owner).items()):
            if id(value) in makers or (owner is torch and name.endswith("_like") and callable(value)):
                devices.patch(owner, name, wrap_argument)
    original_to = tensor.to  # the unwrapped method
    for kind in ("cuda", "xpu"):
        devices.patch(tensor, kind, partial(_wrap_move, devices, kind, original_to))
    for name in [name for name in dir(tensor) if name.startswith("new_")]:
        devices.patch(tensor, name, wrap_argument)
    # a CPU-only torch does not accept a number
    for owner, name in ((tensor, "to"), (torch.nn.Module, "to"), (DeviceContext, "__init__")):
        devices.patch(owner, name, partial(wrap_argument, position=1))
    devices.patch(tensor, "type", partial(wrap_argument, position=1, name="dtype", change=devices.type_name))
    devices.patch(
        torch,
        "set_default_tensor_type",
        partial(wrap_argument, position=0, name="t", change=devices.type_name),
    )
    devices.patch(tensor, "pin_memory", lambda original: lambda tensor, device=None: tensor)
    devices.patch(tensor, "record_stream", lambda original: lambda tensor, stream: None)
    devices.patch(torch, "set_default_device", partial(_default_device, devices))
    devices.ledger.set(
        tensor, "is_cuda", property(lambda tensor: _is_cuda_for_user(sys._getframe(1))), new=True
    )
    devices.ledger.set(torch, "Generator", _generators(devices, torch.Generator))
    devices.patch(torch.UntypedStorage, "to", wrap_argument)  # `cuda` calls this method
    # every storage of a checkpoint passes this function, for any `map_location`
    devices.patch(
        torch.serialization,
        "default_restore_location",
        partial(
            wrap_argument,
            position=1,
            name="location",
            change=lambda location: _redirect_location(devices, location),
        ),
    )
    warnings.filterwarnings(
        "ignore", message=r"'pin_memory' argument is set as true but", category=UserWarning
    )


def _redirect_location(devices: DeviceArguments, location: Any) -> Any:
    name = location.decode("ascii") if isinstance(location, bytes) else location
    return str(devices(name)) if isinstance(name, str) else location


def _wrap_move(devices: DeviceArguments, kind: str, original_to: Function, original: Function) -> Any:
    @wraps(original)
    def moved(
        tensor: Tensor,
        device: Any = None,
        non_blocking: bool = False,
        memory_format: object = devices.torch.preserve_format,
    ) -> Any:
        place = devices(kind if device is None else device)
        return original_to(tensor, place, non_blocking=non_blocking, memory_format=memory_format)

    return moved


def _default_device(devices: DeviceArguments, original: Function) -> Any:
    @wraps(original)
    def set_default_device(device: Any) -> None:
        redirected = devices(device)
        original(
            None if redirected is devices.host else redirected
        )  # a CPU default would slow down every call

    return set_default_device


def _generators(devices: DeviceArguments, original: type) -> Any:
    class GeneratorMeta(type(original)):  # type: ignore[misc]
        def __call__(cls, device: Any = "cpu") -> Any:
            return original(devices(device))

        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, original)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, original)

    return GeneratorMeta("Generator", (original,), {"__module__": "torch", "__doc__": original.__doc__})


def _redirect_types(devices: DeviceArguments) -> None:
    torch = devices.torch
    typed = partial(devices.wrap_argument, name="device_type", change=devices.kind)
    devices.patch(torch.amp.autocast_mode.autocast, "__init__", partial(typed, position=1))
    devices.patch(
        torch.amp.GradScaler,
        "__init__",
        lambda original: wraps(original)(
            lambda scaler, device="cuda", *args, **kwargs: original(
                scaler, devices.kind(device), *args, **kwargs
            )
        ),
    )
    devices.patch(
        torch.cuda.amp.autocast,
        "__init__",
        lambda original: wraps(original)(
            lambda context, enabled=True, dtype=None, cache_enabled=True: original(
                context, enabled, torch.get_autocast_dtype("cpu") if dtype is None else dtype, cache_enabled
            )
        ),
    )
    for name in ("custom_fwd", "custom_bwd"):
        devices.patch(torch.amp, name, typed)
    devices.patch(torch.amp, "is_autocast_available", partial(typed, position=0))
    for name in ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"):
        devices.patch(torch, name, partial(typed, position=0))


def _redirect_wrappers(devices: DeviceArguments) -> None:
    parallel = devices.torch.nn.parallel

    def without_device_ids(original: Function) -> Any:
        return wraps(original)(
            lambda wrapper, module, device_ids=None, output_device=None, *args, **kwargs: original(
                wrapper, module, None, None, *args, **kwargs
            )
        )

    def call_module(original: Function) -> Any:
        return wraps(original)(
            lambda module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None: module(
                *(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {})
            )
        )

    owner = sys.modules[parallel.DataParallel.__module__]
    devices.patch(owner, "_get_available_device_type", lambda original: lambda: None)
    devices.patch(parallel.DataParallel, "__init__", without_device_ids)
    devices.patch(parallel.DistributedDataParallel, "__init__", without_device_ids)
    devices.patch(parallel, "data_parallel", call_module)


# -- torch.cuda and torch.accelerator


def _redirect_modules(devices: DeviceArguments) -> None:
    torch = devices.torch
    for module in (torch.cuda, torch.accelerator):
        owners = [module, *(getattr(module, name) for name in SUBMODULES if hasattr(module, name))]
        for name, answer in host_answers(torch).items():
            original = getattr(module, name, None)
            replacement = _distinct_copy(answer, original)
            for owner in owners if original is not None else ():
                if getattr(owner, name, None) is original:
                    devices.ledger.set(owner, name, replacement)
        for name in ("is_available", "device_count"):
            devices.patch(module, name, partial(_wrap_availability, devices))
    for part in ("nvtx", "profiler"):
        for name in ("range_push", "range_pop", "range_start", "range_end", "mark", "start", "stop"):
            devices.patch(getattr(torch.cuda, part), name, partial(_distinct_copy, zero))
    for name in [name for name in dir(torch) if name.endswith("Tensor") and hasattr(torch.cuda, name)]:
        devices.ledger.set(torch.cuda, name, getattr(torch, name))


def _wrap_availability(devices: DeviceArguments, original: Function) -> Any:
    """Answer `is_available` and `device_count`: the truth for libraries, and what keeps a script alive."""
    is_count = original.__name__ == "device_count"

    @wraps(original)
    def answer(*args: object, **kwargs: object) -> Any:
        devices.hide_cards()
        frame = sys._getframe(1)
        if not is_user_file(frame.f_code.co_filename):
            return original(*args, **kwargs)
        if is_count:  # one device in a script that has no path without CUDA
            lines = linecache.getlines(frame.f_code.co_filename)
            return int(would_end(frame) or not any("is_available" in line for line in lines))
        return would_end(frame)

    return answer


def _is_cuda_for_user(frame: FrameType) -> bool:
    return is_user_file(frame.f_code.co_filename) and would_end(frame)


def _distinct_copy(answer: Function, original: object) -> Any:
    """Return ``answer`` as a new object: the compiler has rules per function of torch, by identity."""
    if isinstance(answer, type):
        return type(answer.__name__, (answer,), {})

    def copy(*args: object, **kwargs: object) -> Any:
        return answer(*args, **kwargs)

    return wraps(original)(copy) if callable(original) else copy
