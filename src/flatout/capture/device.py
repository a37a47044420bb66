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
import warnings
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from flatout.capture.bootstrap import AfterImport, say, speaks_first
from flatout.capture.cuda_checks import ACCELERATORS, ASKS, CudaChecks
from flatout.capture.frames import is_users
from flatout.capture.host_answers import host_answers, zero
from flatout.capture.ledger import Ledger
from flatout.plan.rank_environment import this_rank

VISIBLE = "CUDA_VISIBLE_DEVICES"
OF_A_MODULE = ("memory", "random", "streams")  # submodules of torch.cuda that export the same functions again


def install(asked: str) -> None:
    """At process start, arrange to redirect torch to ``asked`` right after its import."""
    visible = os.environ.get(VISIBLE)
    sys.meta_path.insert(0, AfterImport({"torch": lambda torch: redirect(torch, asked, visible)}))


def redirect(torch: ModuleType, asked: str, visible: str | None) -> None:
    redirection = Redirection(torch, asked, visible, Ledger(), tell_first)
    redirection.install()
    if not redirection.on_host:
        atexit.register(_leave, redirection, os.getpid())


def tell_first(sentence: str) -> None:
    """Print a line once for all processes of a run that live at the same time."""
    claim = f"{os.environ.get('FLATOUT_CRASH_REPORTS', os.devnull)}.device"
    here = this_rank()  # of several ranks, one prints
    rank = here.rank if here is not None else int(os.environ.get("RANK") or 0)
    if rank == 0 and "FLATOUT_CRASH_REPORTS" in os.environ and speaks_first(claim):
        say(sentence)
        atexit.register(_remove, f"{claim}.reported", os.getpid())


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid and os.path.exists(path):
        os.unlink(path)


def _leave(redirection: Redirection, pid: int) -> None:
    """At the end, report a script that names no device and so cannot be moved to an accelerator."""
    kind = redirection.torch.nn.Parameter
    if (
        os.getpid() == pid
        and not redirection.named
        and any(issubclass(type(thing), kind) and thing.grad is not None for thing in gc.get_objects())
    ):
        redirection.tell(
            f"the script names no accelerator: it trained on the CPU, and --device {redirection.asked} had no effect"
        )


class Redirection:
    """Replaces devices in calls of torch.

    ``asked`` replaces every accelerator that the script names. ``tell`` is called for each that differs.
    ``visible``: the value of CUDA_VISIBLE_DEVICES, in which ``asked`` is counted.
    """

    def __init__(
        self, torch: Any, asked: str, visible: str | None, ledger: Ledger, tell: Callable[[str], None]
    ) -> None:
        self.torch, self.asked, self.visible, self.ledger, self.tell = torch, asked, visible, ledger, tell
        self.target = torch.device(asked)
        self.on_host = self.target.type == "cpu"
        # ``chosen``: the script names exactly this device; a device without a number may mean it
        self.named = self.chosen = False
        self.demands = CudaChecks()
        self._known: dict[Any, Any] = {}

    def __call__(self, device: Any) -> Any:
        """Return the device for torch when the script passes ``device``: a device, name or number.

        Non-accelerators stay.
        """
        if type(device) not in (str, int, self.torch.device):
            return device
        if device not in self._known:
            self._known[device] = self._redirected(device)
        return self._known[device]

    def _redirected(self, device: Any) -> Any:
        self._keep_visible()
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

    def _keep_visible(self) -> None:
        """Restore CUDA_VISIBLE_DEVICES.

        Many scripts set it themselves, before they import torch or use a card.
        """
        if os.environ.get(VISIBLE) != self.visible:
            self.ledger.set_item(os.environ, VISIBLE, self.visible or "")
            if self.visible is None:
                del os.environ[VISIBLE]

    def kind(self, name: Any) -> Any:
        """Redirect a device type alone: "cuda"."""
        return self(name).type if name in ACCELERATORS and name != self.target.type else name

    def type_name(self, name: Any) -> Any:
        """Redirect a tensor type name: "torch.cuda.FloatTensor"."""
        if not self.on_host or not isinstance(name, str) or not name.startswith("torch.cuda."):
            return name
        self("cuda")
        return name.replace("torch.cuda.", "torch.")

    # -- functions with a device argument -------------------------------------------------------------------

    def install(self) -> None:
        self._keep_visible()
        self._install_tensors()
        self._install_loading()
        self._install_types()
        self._install_wrappers()
        self._install_modules()
        if self.on_host:
            self._install_extensions()

    def _set(self, owner: Any, name: str, change: Callable[[Any], Any]) -> None:
        """Patch an attribute; skip it if this torch lacks it, since then no script can use it."""
        if hasattr(owner, name):
            self.ledger.set(owner, name, change(getattr(owner, name)))

    def _takes(
        self,
        really: Any,
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
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs:
                if kwargs.get(key) is not None:
                    kwargs[key] = change(kwargs[key])
                if not pins:
                    kwargs.pop("pin_memory", None)
            if at is not None and len(args) > at:
                args = (*args[:at], change(args[at]), *args[at + 1 :])
            return really(*args, **kwargs)

        return call

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

    def _moved(self, kind: str, moves: Any, really: Any) -> Any:
        """Wrap `Tensor.cuda` and similar methods."""
        if kind == self.target.type:
            return lambda tensor, device=None, *args, **kwargs: really(
                tensor, self(kind if device is None else device), *args, **kwargs
            )

        @wraps(really)
        def moved(
            tensor: Any,
            device: Any = None,
            non_blocking: bool = False,
            memory_format: Any = self.torch.preserve_format,
        ) -> Any:
            return moves(
                tensor,
                self(kind if device is None else device),
                non_blocking=non_blocking,
                memory_format=memory_format,
            )

        return moved

    def _is_cuda(self, really: Any) -> property:
        """Answer `Tensor.is_cuda`: yes on another accelerator, or if the script would end otherwise."""
        kind = self.target.type

        def is_cuda(tensor: Any) -> bool:
            if really.__get__(tensor) or kind == "cuda":
                return bool(really.__get__(tensor))
            frame = sys._getframe(1)
            return is_users(frame.f_code.co_filename) and (
                tensor.device.type == kind if not self.on_host else self.demands.at(frame)
            )

        return property(is_cuda)

    def _default_device(self, really: Any) -> Any:
        @wraps(really)
        def set_default_device(device: Any) -> None:
            found = self(device)
            # a CPU default would slow down every call
            really(None if self.on_host and found is self.target and found is not device else found)

        return set_default_device

    def _generators(self, really: Any) -> Any:
        """Wrap `torch.Generator`, a C type; the wrapper creates generators of that type."""
        redirected = self

        class Makes(type(really)):  # type: ignore[misc]
            def __call__(cls, device: Any = "cpu") -> Any:
                return really(redirected(device))

            def __instancecheck__(cls, thing: Any) -> bool:
                return isinstance(thing, really)

            def __subclasscheck__(cls, kind: type) -> bool:
                return issubclass(kind, really)

        return Makes("Generator", (really,), {"__module__": "torch", "__doc__": really.__doc__})

    def _install_loading(self) -> None:
        """Redirect every storage of a checkpoint, which passes one function for any `map_location`."""
        torch = self.torch

        def by_name(location: Any) -> Any:
            name = location.decode("ascii") if isinstance(location, bytes) else location
            return str(self(name)) if isinstance(name, str) else location

        self._set(
            torch.serialization,
            "default_restore_location",
            partial(self._takes, at=1, key="location", change=by_name),
        )
        self._set(torch.UntypedStorage, "to", self._takes)  # `cuda` calls this method
        jit = self._takes(torch.jit.load, at=1, key="map_location")
        self.ledger.set(
            torch.jit,
            "load",
            wraps(torch.jit.load)(
                lambda f, map_location=None, *args, **kwargs: jit(
                    f, "cpu" if map_location is None and self.on_host else map_location, *args, **kwargs
                )
            ),
        )

    def _install_types(self) -> None:
        """Redirect functions with a device type: autocast, GradScaler.

        An explicit dtype stays; CUDA's default becomes the target's.
        """
        torch, kind = self.torch, self.kind
        self._set(
            torch.amp.autocast_mode.autocast,
            "__init__",
            partial(self._takes, at=1, key="device_type", change=kind),
        )
        self._set(
            torch.amp.GradScaler,
            "__init__",
            lambda really: wraps(really)(
                lambda scaler, device="cuda", *args, **kwargs: really(scaler, kind(device), *args, **kwargs)
            ),
        )
        if self.target.type != "cuda":
            self._set(
                torch.cuda.amp.autocast,
                "__init__",
                lambda really: wraps(really)(
                    lambda context, enabled=True, dtype=None, cache_enabled=True: really(
                        context,
                        enabled,
                        torch.get_autocast_dtype(self.target.type) if dtype is None else dtype,
                        cache_enabled,
                    )
                ),
            )
        for name in ("custom_fwd", "custom_bwd", "is_autocast_available"):
            self._set(
                torch.amp,
                name,
                partial(self._takes, at=0 if name.startswith("is") else None, key="device_type", change=kind),
            )
        for name in (
            "is_autocast_enabled",
            "get_autocast_dtype",
            "set_autocast_enabled",
            "set_autocast_dtype",
        ):
            self._set(torch, name, partial(self._takes, at=0, key="device_type", change=kind))

    def _install_wrappers(self) -> None:
        """Restrict DataParallel and similar wrappers to the one device."""
        parallel = self.torch.nn.parallel
        if self.target.index is None and not self.on_host:
            return
        only = None if self.on_host else [self.target]

        def replicas(really: Any) -> Any:
            return wraps(really)(
                lambda wrapper, module, device_ids=None, output_device=None, *args, **kwargs: really(
                    wrapper, module, only, None, *args, **kwargs
                )
            )

        def ranks(really: Any) -> Any:
            return wraps(really)(
                lambda wrapper, module, device_ids=None, output_device=None, *args, **kwargs: really(
                    wrapper, module, device_ids and only, None, *args, **kwargs
                )
            )

        def once(really: Any) -> Any:
            return wraps(really)(
                lambda module, inputs, device_ids=None, output_device=None, dim=0, module_kwargs=None: (
                    really(module, inputs, only, None, dim, module_kwargs)
                    if only
                    else module(
                        *(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {})
                    )
                )
            )

        if self.on_host:
            self._set(
                sys.modules[parallel.DataParallel.__module__],
                "_get_available_device_type",
                lambda really: lambda: None,
            )
        self._set(parallel.DataParallel, "__init__", replicas)
        self._set(parallel.DistributedDataParallel, "__init__", ranks)
        self._set(parallel, "data_parallel", once)

    def _install_extensions(self) -> None:
        """Report built CUDA extensions: they cannot be redirected, and their failure is silent."""

        def built(really: Any) -> Any:
            @wraps(really)
            def build(*args: Any, **kwargs: Any) -> Any:
                given = inspect.signature(really).bind(*args, **kwargs).arguments
                sources = given.get("sources") or ()
                if given.get("cuda_sources") or any(
                    str(name).endswith(".cu") for name in ([sources] if isinstance(sources, str) else sources)
                ):
                    say(
                        f"--device {self.asked} cannot redirect the CUDA extension {given['name']!r}: its kernels run only on a CUDA device. Use a code "
                        "path of the script without it, or run the script on a machine with a CUDA device"
                    )
                return really(*args, **kwargs)

            return build

        def wrap(module: Any) -> None:
            for name in ("load", "load_inline"):
                self._set(module, name, built)

        name = "torch.utils.cpp_extension"
        if name in sys.modules:
            wrap(sys.modules[name])
        else:
            sys.meta_path.insert(0, AfterImport({name: wrap}))

    # -- torch.cuda and other accelerator modules -----------------------------------------------------------

    def _install_modules(self) -> None:
        torch, kind, answers = self.torch, self.target.type, self._answers()
        for name in (*ACCELERATORS, *(("accelerator",) if self.on_host else ())):
            if name != kind:
                self._answer_for(getattr(torch, name), answers)
        if self.on_host:
            for name in [
                name for name in dir(torch) if name.endswith("Tensor") and hasattr(torch.cuda, name)
            ]:
                self.ledger.set(torch.cuda, name, getattr(torch, name))
        elif self.target.index is not None:
            self._answer_by_index(getattr(torch, kind))
        for owner in (
            torch.cuda,
            torch.xpu,
            torch.mps,
            torch.backends.mps,
            *((torch.accelerator,) if self.on_host else ()),
        ):
            for name in ASKS:
                self._set(owner, name, partial(self._asked, name, of_target=owner is getattr(torch, kind)))

    def _answer_for(self, module: Any, answers: dict[str, Any]) -> None:
        owners = [
            module,
            *(part for name in OF_A_MODULE if isinstance(part := getattr(module, name, None), ModuleType)),
        ]
        for name, answer in answers.items():
            really = getattr(module, name, None)
            own = _own(answer, really)
            for owner in owners if really is not None else ():
                if getattr(owner, name, None) is really:
                    self.ledger.set(owner, name, own)
        for part, names in (
            ("nvtx", ("range_push", "range_pop", "range_start", "range_end", "mark")),
            ("profiler", ("start", "stop")),
        ):
            for name in names:
                self._set(getattr(module, part, None), name, partial(_own, zero))

    def _answers(self) -> dict[str, Any]:
        """Return the functions of the target accelerator, or else neutral answers, by name."""
        found = host_answers(self.torch)
        own = getattr(self.torch, self.target.type)
        for name in found if not self.on_host else ():
            for owner in (own, self.torch.accelerator):
                if hasattr(owner, name):
                    found[name] = self._by_index(getattr(owner, name))
                    break
        return found

    def _answer_by_index(self, module: Any) -> None:
        """On one of several cards, redirect every device number, and calls without a number, to this card."""
        for owner in (module, *(getattr(module, name, None) for name in OF_A_MODULE), self.torch.accelerator):
            for name, really in list(vars(owner).items()) if owner is not None else ():
                if not name.startswith("_") and (found := self._by_index(really)) is not really:
                    self.ledger.set(owner, name, found)
        self._set(module.device, "__init__", partial(self._takes, at=1))
        self._set(module.Stream, "__new__", lambda really: staticmethod(self._takes(really, at=1)))
        module._lazy_call(partial(module.set_device, self.target))

    def _by_index(self, really: Any) -> Any:
        """Wrap ``really`` to redirect its argument ``device``, if it has one.

        Its own module means the card that it names.
        """
        names = list(inspect.signature(really).parameters) if inspect.isfunction(really) else []
        key = next((name for name in ("device", "device_index") if name in names), None)
        if key is None:
            return really
        redirected, module = self._takes(really, at=names.index(key), key=key), f"torch.{self.target.type}"

        @wraps(really)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (
                really if str(sys._getframe(1).f_globals.get("__name__")).startswith(module) else redirected
            )(*args, **kwargs)

        return call

    def _asked(self, name: str, really: Any, of_target: bool) -> Any:
        """Answer `is_available` and `device_count`: the truth for libraries, one device for the script."""
        counts = name == "device_count"

        @wraps(really)
        def answer(*args: Any, **kwargs: Any) -> Any:
            self._keep_visible()
            frame = sys._getframe(1)
            if not is_users(frame.f_code.co_filename) or (
                of_target and (not counts or self.target.index is None)
            ):
                return really(*args, **kwargs)
            there = (
                not self.on_host
                or self.demands.at(frame)
                or (counts and not self.demands.has_another_way(frame.f_code.co_filename))
            )
            return int(there) if counts else there

        return answer


def _own(answer: Any, really: Any) -> Any:
    """Return ``answer`` as a new object: the compiler has rules per function of torch, by identity."""
    if isinstance(answer, type):
        return type(answer.__name__, (answer,), {})

    def own(*args: Any, **kwargs: Any) -> Any:
        return answer(*args, **kwargs)

    return wraps(really)(own) if callable(really) else own
