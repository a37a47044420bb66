"""Images that stand for what a transform would have returned, and become it as soon as anybody looks inside.

A deferred tensor is a `torch.Tensor` without data, a deferred picture a `PIL.Image.Image` without pixels. Their shape, dtype, size and mode are
answered where they are certain; any other access asks the recorder to compute the image, and from then on the object is an ordinary one.
Stacking is the exception: a list of deferred tensors becomes a batch without becoming tensors first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout.pipeline.operation import Form, Shape

EMPTY = torch.empty(0)
CLASSES: set[type] = set()  # of deferred images
DEEPEST = 6


class Pending(Protocol):
    """The work that a deferred image stands for."""

    out: Shape
    form: Form  # of the image once it is computed
    certain: bool  # whether ``out`` and ``form`` are what the image will have
    recorder: Any  # ``look(image)`` computes; ``stack(images)`` answers their batch, or None


class _Deferred(Tensor):
    """What deferred tensors of every kind have in common."""

    pending: Pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        answer = CERTAIN.get(func)
        if answer is not None and not kwargs and is_deferred(args[0]) and args[0].pending.certain:
            return answer(args[0].pending, *args[1:])
        if func is torch.stack and not set(kwargs) - {"dim", "tensors", "out"} and kwargs.get("out") is None:
            images, dim = [*args, *(kwargs[name] for name in ("tensors", "dim") if name in kwargs), 0][:2]
            batch = stacked(images) if dim == 0 else None
            if batch is not None:
                return batch
        for image in deferred_in((args, kwargs)):
            image.pending.recorder.look(image)
        return func(*args, **kwargs)


def _asked(name: str) -> Any:
    """torchvision's tensors answer these without torch's protocol."""
    getter = vars(torch._C.TensorBase)[name].__get__

    def answer(image: Any) -> Any:
        return _Deferred.__torch_function__(getter, (), (image,))

    return property(answer)


def _size(pending: Pending, at: int | None = None) -> Any:
    return torch.Size(pending.out) if at is None else pending.out[at]


CERTAIN: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda pending, *_: torch.Size(pending.out),
    Tensor.size: _size,
    Tensor.dim: lambda pending: 3,
    Tensor.ndimension: lambda pending: 3,
    Tensor.ndim.__get__: lambda pending, *_: 3,
    Tensor.numel: lambda pending: torch.Size(pending.out).numel(),
    Tensor.nelement: lambda pending: torch.Size(pending.out).numel(),
    Tensor.__len__: lambda pending: pending.out[0],
    Tensor.dtype.__get__: lambda pending, *_: pending.form.dtype,
    Tensor.is_floating_point: lambda pending: pending.form.dtype.is_floating_point,
    torch.is_floating_point: lambda pending: pending.form.dtype.is_floating_point,
    Tensor.device.__get__: lambda pending, *_: EMPTY.device,
    Tensor.is_cuda.__get__: lambda pending, *_: False,
    Tensor.layout.__get__: lambda pending, *_: torch.strided,
    Tensor.is_sparse.__get__: lambda pending, *_: False,
    Tensor.is_nested.__get__: lambda pending, *_: False,
    Tensor.requires_grad.__get__: lambda pending, *_: False,
}


@cache
def tensor_class(real: type) -> type:
    """The class of deferred tensors that become tensors of this class: Tensor, or torchvision's Image."""
    asked = {name: _asked(name) for name in ("shape", "ndim", "dtype", "device")}
    kind = type("DeferredTensor", (_Deferred, real) if real is not Tensor else (_Deferred,), {"becomes": real, **asked})
    CLASSES.add(kind)
    return kind


@cache
def picture_class() -> type:
    """The class of deferred PIL images. Called where the program has imported PIL."""
    from PIL.Image import Image

    class DeferredPicture(Image):
        """Every attribute but the two that are certain is that of the computed image."""

        becomes = Image

        def __getattribute__(self, name: str) -> Any:
            if name in ("__class__", "__dict__"):
                return Image if name == "__class__" else super().__getattribute__(name)
            pending = vars(self)["pending"]
            if name == "pending":
                return pending
            if name in ("size", "mode") and pending.certain:
                return (pending.out.width, pending.out.height) if name == "size" else pending.form.mode
            pending.recorder.look(self)
            return getattr(self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            vars(self)["pending"].recorder.look(self)
            Image.__setattr__(self, name, value)

        def __reduce_ex__(self, protocol: Any) -> Any:
            vars(self)["pending"].recorder.look(self)
            return self.__reduce_ex__(protocol)

        def __eq__(self, other: object) -> bool:
            vars(self)["pending"].recorder.look(self)
            return bool(self == other)

        __hash__ = None  # type: ignore[assignment]  # as PIL has it

    CLASSES.add(DeferredPicture)
    return DeferredPicture


def deferred(pending: Pending) -> Any:
    """The image that stands for this work."""
    form = pending.form
    if form.kind == "pil":
        image: Any = object.__new__(picture_class())
        vars(image)["pending"] = pending
    else:
        image = Tensor._make_subclass(tensor_class(sys.modules["torchvision.tv_tensors"].Image if form.tv else Tensor), EMPTY)
        image.pending = pending
    return image


def is_deferred(thing: Any) -> bool:
    return type(thing) in CLASSES


def become(image: Any, value: Any) -> None:
    """From now on the deferred image is the real one: ``value``, a tensor in memory of its own or a PIL image."""
    held, real = vars(image), type(image).becomes
    del held["pending"]
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            image.data = value
        image.__class__ = real
    else:
        held.update(vars(value))
        object.__dict__["__class__"].__set__(image, real)


def stacked(images: Sequence[Any]) -> Tensor | None:
    """The batch of deferred tensors of one recorder; None where some are none."""
    if not isinstance(images, (list, tuple)) or not images or not all(map(is_deferred, images)):
        return None
    recorder = images[0].pending.recorder
    if any(image.pending.recorder is not recorder for image in images):
        return None
    batch: Tensor | None = recorder.stack(images)
    return batch


def collate_deferred(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Tensor:
    """torch's own collation of tensors, where the first one is deferred."""
    together = stacked(list(batch))
    if together is not None:
        return together
    from torch.utils.data._utils.collate import collate_tensor_fn

    for image in deferred_in(batch):
        image.pending.recorder.look(image)
    found: Tensor = collate_tensor_fn(list(batch), collate_fn_map=collate_fn_map)
    return found


def deferred_in(thing: Any, depth: int = 0) -> Iterator[Any]:
    """The deferred images in nested lists, tuples and dictionaries."""
    if is_deferred(thing):
        yield thing
    elif depth < DEEPEST and isinstance(thing, (list, tuple, dict)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from deferred_in(part, depth + 1)
