"""Calls of transforms, wherever a program's own code makes them, are shown to the recorder of the thread that makes them.

The classes of torchvision's transforms, and of albumentations and kornia where the program has imported them, are given another ``__call__``
while a lever needs it. It does what the class's own does, unless a recorder is at work in this thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data._utils.collate import default_collate_fn_map

from flatout.pipeline.deferred import collate_deferred, tensor_class

Plain = Callable[[Any, Any], Any]
"""What the call of a transform does without a recorder: ``plain(transform, image) -> image``."""


class Recorder(Protocol):
    def call(self, transform: Any, image: Any, plain: Plain) -> Any:
        """What the program's code is given in place of what ``plain(transform, image)`` answers."""

    def reseeded(self) -> None:
        """The program's code is about to set torch's generator on the CPU."""


class _Thread(threading.local):
    recorder: Recorder | None = None


HERE = _Thread()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Calls in this thread are shown to this recorder; with None, to nobody."""
    before, HERE.recorder = HERE.recorder, recorder
    try:
        yield
    finally:
        HERE.recorder = before


class Keyword:
    """A transform of albumentations as one of an image: it takes the image by name and answers a dictionary."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __call__(self, image: Any) -> Any:
        return self.transform(image=image)["image"]


def as_step(transform: Any) -> Any:
    """The transform as a function of one image."""
    return Keyword(transform) if package_of(transform) == "albumentations" else transform


def package_of(transform: Any) -> str:
    return type(transform).__module__.partition(".")[0]


class _Interception:
    """The classes whose calls are intercepted. Each lever that needs it holds it; with the last one that lets go, all is as it was."""

    def __init__(self) -> None:
        self._holders = 0
        self._patches: Any = None
        self.ledger_type: Any = None  # for workers that start from nothing
        self._classes: set[type] = set()

    def hold(self, ledger: Any) -> None:
        """Until ``ledger`` is restored."""
        if self._patches is None:
            self.ledger_type = type(ledger)
            self._patches = self.ledger_type()
            self._observe_seeding()
        self._holders += 1
        ledger.call("transforms intercepted", self._let_go)
        self.renew()

    def renew(self) -> None:
        """Take in the classes of libraries that the program has imported meanwhile."""
        if self._patches is None:
            return
        found = [kind for kind in _classes() if kind not in self._classes]
        plain = {kind: kind.__call__ for kind in found}  # before any of them is changed: one may inherit from another
        for kind in found:
            wrap = _by_keyword if kind.__module__.startswith("albumentations") else _by_position
            self._patches.set(kind, "__call__", wrap(kind, plain[kind]))
        self._classes.update(found)
        tv_tensors = sys.modules.get("torchvision.tv_tensors")
        for real in (Tensor, *((tv_tensors.Image,) if tv_tensors else ())):
            if tensor_class(real) not in default_collate_fn_map:
                self._patches.set_item(default_collate_fn_map, tensor_class(real), collate_deferred)

    def _observe_seeding(self) -> None:
        for name in ("manual_seed", "seed", "set_rng_state"):
            seeding = _announced(getattr(torch, name))
            for module in (torch, torch.random):
                self._patches.set(module, name, seeding)

    def _let_go(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            patches, self._patches = self._patches, None
            self._classes.clear()
            patches.restore()


INTERCEPTION = _Interception()


def _classes() -> list[type]:
    """The transforms of the libraries that are imported."""
    found: list[type] = []
    for module, is_one in (("torchvision.transforms.transforms", _is_v1), ("torchvision.transforms.v2", _is_module),
                           ("albumentations.core.composition", _is_albumentations), ("kornia.augmentation", _is_module)):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        found += [value for name, value in names.items() if isinstance(value, type) and not name.startswith("_") and is_one(value, module.partition(".")[0])]
    return list(dict.fromkeys(found))


def _is_v1(kind: type, package: str) -> bool:
    return kind.__module__ == "torchvision.transforms.transforms" and any("__call__" in vars(base) for base in kind.__mro__)


def _is_module(kind: type, package: str) -> bool:
    return issubclass(kind, torch.nn.Module) and kind.__module__.startswith(package + ".")


def _is_albumentations(kind: type, package: str) -> bool:
    return kind.__name__ == "Compose"


def _announced(seeding: Any) -> Any:
    @wraps(seeding)
    def announced(*args: Any, **kwargs: Any) -> Any:
        if HERE.recorder is not None:
            HERE.recorder.reseeded()
        return seeding(*args, **kwargs)

    return announced


def _by_position(kind: type, plain: Any) -> Any:
    @wraps(plain)
    def __call__(transform: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = HERE.recorder
        if recorder is None or kwargs or len(args) != 1 or type(transform) is not kind:
            return plain(transform, *args, **kwargs)
        return recorder.call(transform, args[0], plain)

    return __call__


def _by_keyword(kind: type, plain: Any) -> Any:
    def alone(transform: Any, image: Any) -> Any:
        return plain(transform, image=image)["image"]

    @wraps(plain)
    def __call__(transform: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = HERE.recorder
        if recorder is None or args or kwargs.keys() != {"image"} or type(transform) is not kind:
            return plain(transform, *args, **kwargs)
        return {"image": recorder.call(transform, kwargs["image"], alone)}

    return __call__
