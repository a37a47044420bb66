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
from flatout.agent.device_arguments import VISIBLE
from flatout.agent.device_messages import tell_first
from flatout.agent.device_tensors import TensorRedirection
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
    redirection = Redirection(torch, asked, visible, Ledger(), tell_first)
    redirection.install()
    if not redirection.on_host:
        atexit.register(_leave, redirection, os.getpid())


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


class Redirection(TensorRedirection):
    """Replaces devices in calls of torch.

    ``asked`` replaces every accelerator that the script names. ``tell`` is called for each that differs.
    ``visible``: the value of CUDA_VISIBLE_DEVICES, in which ``asked`` is counted.
    """

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

        def built(really: Callable[..., Any]) -> Any:
            @wraps(really)
            def build(*args: object, **kwargs: object) -> Any:
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

        def wrap(module: Module) -> None:
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

    def _answer_by_index(self, module: Module) -> None:
        """On one of several cards, redirect every device number, and calls without a number, to this card."""
        for owner in (module, *(getattr(module, name, None) for name in OF_A_MODULE), self.torch.accelerator):
            for name, really in list(vars(owner).items()) if owner is not None else ():
                if not name.startswith("_") and (found := self._by_index(really)) is not really:
                    self.ledger.set(owner, name, found)
        self._set(module.device, "__init__", partial(self._takes, at=1))
        self._set(module.Stream, "__new__", lambda really: staticmethod(self._takes(really, at=1)))
        module._lazy_call(partial(module.set_device, self.target))

    def _by_index(self, really: Callable[..., Any]) -> Any:
        """Wrap ``really`` to redirect its argument ``device``, if it has one.

        Its own module means the card that it names.
        """
        names = list(inspect.signature(really).parameters) if inspect.isfunction(really) else []
        key = next((name for name in ("device", "device_index") if name in names), None)
        if key is None:
            return really
        redirected, module = self._takes(really, at=names.index(key), key=key), f"torch.{self.target.type}"

        @wraps(really)
        def call(*args: object, **kwargs: object) -> Any:
            return (
                really if str(sys._getframe(1).f_globals.get("__name__")).startswith(module) else redirected
            )(*args, **kwargs)

        return call

    def _asked(self, name: str, really: Callable[..., Any], of_target: bool) -> Any:
        """Answer `is_available` and `device_count`: the truth for libraries, one device for the script."""
        counts = name == "device_count"

        @wraps(really)
        def answer(*args: object, **kwargs: object) -> Any:
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

    def own(*args: object, **kwargs: object) -> Any:
        return answer(*args, **kwargs)

    return wraps(really)(own) if callable(really) else own
