"""Intercepts calls of transforms in a program's code and passes them to the recorder of the calling thread.

While a lever needs it, the transform classes of torchvision get another ``__call__``. So do those of
albumentations and kornia, if the program has imported them. It does the same as the original, unless this
thread has a recorder.
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

from flatout.data.deferred import collate_deferred, tensor_class

OriginalCall = Callable[[Any, Any], Any]
"""The call of a transform without a recorder: ``original(transform, image) -> image``."""


class Recorder(Protocol):
    def call(self, transform: object, image: object, original: OriginalCall) -> Any:
        """The result that the program gets instead of ``original(transform, image)``."""

    def before_seeding(self) -> None:
        """Called before the program sets torch's CPU generator."""


class _Thread(threading.local):
    recorder: Recorder | None = None


THREAD = _Thread()


@contextmanager
def recording(recorder: Recorder | None) -> Iterator[None]:
    """Pass calls in this thread to this recorder, or to none."""
    before, THREAD.recorder = THREAD.recorder, recorder
    try:
        yield
    finally:
        THREAD.recorder = before


class KeywordTransform:
    """An albumentations transform as a function of an image: it takes ``image=`` and returns a dictionary."""

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __call__(self, image: object) -> Any:
        return self.transform(image=image)["image"]


def as_step(transform: Callable[..., Any]) -> Callable[..., Any]:
    """The transform as a function of one image."""
    return KeywordTransform(transform) if package_of(transform) == "albumentations" else transform


def package_of(transform: object) -> str:
    return type(transform).__module__.partition(".")[0]


class _Interception:
    """The intercepted classes. Each lever that needs them enables this; the last release restores them."""

    def __init__(self) -> None:
        self._holders = 0
        self._patches: Any = None
        self.ledger_type: Any = None  # for spawned workers
        self._classes: set[type] = set()

    def enable(self, ledger: Any) -> None:
        """Intercept calls until ``ledger`` is restored."""
        if self._patches is None:
            self.ledger_type = type(ledger)
            self._patches = self.ledger_type()
            self._observe_seeding()
        self._holders += 1
        ledger.on_restore("transforms intercepted", self._release)
        self.add_classes()

    def add_classes(self) -> None:
        """Add the classes of libraries that the program has imported since."""
        if self._patches is None:
            return
        new = [kind for kind in _classes() if kind not in self._classes]
        originals = {
            kind: kind.__call__ for kind in new
        }  # read all before changing any: one may inherit from another
        for kind in new:
            wrap = _by_keyword if kind.__module__.startswith("albumentations") else _by_position
            self._patches.set(kind, "__call__", wrap(kind, originals[kind]))
        self._classes.update(new)
        tv_tensors = sys.modules.get("torchvision.tv_tensors")
        for real in (Tensor, *((tv_tensors.Image,) if tv_tensors else ())):
            if tensor_class(real) not in default_collate_fn_map:
                self._patches.set_item(default_collate_fn_map, tensor_class(real), collate_deferred)

    def _observe_seeding(self) -> None:
        for name in ("manual_seed", "seed", "set_rng_state"):
            seeding = _wrap_seeding(getattr(torch, name))
            for module in (torch, torch.random):
                self._patches.set(module, name, seeding)

    def _release(self) -> None:
        self._holders -= 1
        if self._holders == 0:
            patches, self._patches = self._patches, None
            self._classes.clear()
            patches.restore()


INTERCEPTION = _Interception()


def _classes() -> list[type]:
    classes: list[type] = []
    for module, is_transform in (
        ("torchvision.transforms.transforms", _is_v1),
        ("torchvision.transforms.v2", _is_module),
        ("albumentations.core.composition", _is_albumentations),
        ("kornia.augmentation", _is_module),
    ):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        classes += [
            value
            for name, value in names.items()
            if isinstance(value, type)
            and not name.startswith("_")
            and is_transform(value, module.partition(".")[0])
        ]
    return list(dict.fromkeys(classes))


def _is_v1(kind: type, package: str) -> bool:
    return kind.__module__ == "torchvision.transforms.transforms" and any(
        "__call__" in vars(base) for base in kind.__mro__
    )


def _is_module(kind: type, package: str) -> bool:
    return issubclass(kind, torch.nn.Module) and kind.__module__.startswith(package + ".")


def _is_albumentations(kind: type, package: str) -> bool:
    return kind.__name__ == "Compose"


def _wrap_seeding(seeding: Callable[..., Any]) -> Any:
    @wraps(seeding)
    def wrapper(*args: object, **kwargs: object) -> Any:
        if THREAD.recorder is not None:
            THREAD.recorder.before_seeding()
        return seeding(*args, **kwargs)

    return wrapper


def _by_position(kind: type, original: Callable[..., Any]) -> Any:
    @wraps(original)
    def __call__(transform: object, *args: Any, **kwargs: Any) -> Any:
        recorder = THREAD.recorder
        if recorder is None or kwargs or len(args) != 1 or type(transform) is not kind:
            return original(transform, *args, **kwargs)
        return recorder.call(transform, args[0], original)

    return __call__


def _by_keyword(kind: type, original: Callable[..., Any]) -> Any:
    def call_original(transform: object, image: object) -> Any:
        return original(transform, image=image)["image"]

    @wraps(original)
    def __call__(transform: object, *args: Any, **kwargs: Any) -> Any:
        recorder = THREAD.recorder
        if recorder is None or args or kwargs.keys() != {"image"} or type(transform) is not kind:
            return original(transform, *args, **kwargs)
        return {"image": recorder.call(transform, kwargs["image"], call_original)}

    return __call__
