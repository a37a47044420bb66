"""Deferred images: placeholders for the result of a transform, computed on first access.

A deferred tensor is a `torch.Tensor` without data, and a deferred PIL image is a `PIL.Image.Image` without
pixels. Shape, dtype, size and mode are known without computing where they are certain. Any other access makes
the recorder compute the image, and the object becomes an ordinary one. Stacking is the exception: a list of
deferred tensors becomes a batch directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from flatout.data.operation import ImageForm, ImageShape

EMPTY = torch.empty(0)
CLASSES: set[type] = set()  # the classes of deferred images
MAX_DEPTH = 6


class Pending(Protocol):
    """The pending computation of a deferred image."""

    out_shape: ImageShape
    form: ImageForm  # of the image once it is computed
    metadata_known: bool  # whether ``out`` and ``form`` are final
    recorder: Any  # ``look(image)`` computes; ``stack(images)`` returns their batch or None


class _Deferred(Tensor):
    pending: Pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and not kwargs and is_deferred(args[0]) and (pending := args[0].pending).metadata_known:
            answer = getattr(pending, "answers", METADATA).get(func)
            if answer is not None:
                return answer(pending, *args[1:])
        if func is torch.stack and not set(kwargs) - {"dim", "tensors", "out"} and kwargs.get("out") is None:
            images, dim = [*args, *(kwargs[name] for name in ("tensors", "dim") if name in kwargs), 0][:2]
            batch = stack_deferred(images) if dim == 0 else None
            if batch is not None:
                return batch
        access((args, kwargs))
        return func(*args, **kwargs)


def _metadata_property(name: str) -> Any:
    """A property for attributes that torchvision's tensors read without ``__torch_function__``."""
    getter = vars(torch._C.TensorBase)[name].__get__

    def answer(image: object) -> Any:
        return _Deferred.__torch_function__(getter, (), (image,))

    return property(answer)


def _size(pending: Pending, dim: int | None = None) -> Any:
    return torch.Size(pending.out_shape) if dim is None else pending.out_shape[dim]


METADATA: dict[Any, Callable[..., Any]] = {
    Tensor.shape.__get__: lambda pending, *_: torch.Size(pending.out_shape),
    Tensor.size: _size,
    Tensor.__len__: lambda pending: pending.out_shape[0],
    Tensor.dtype.__get__: lambda pending, *_: pending.form.dtype,
    Tensor.device.__get__: lambda pending, *_: EMPTY.device,
    Tensor.layout.__get__: lambda pending, *_: torch.strided,
    **dict.fromkeys(
        (Tensor.dim, Tensor.ndimension, Tensor.ndim.__get__), lambda pending, *_: len(pending.out_shape)
    ),
    **dict.fromkeys((Tensor.numel, Tensor.nelement), lambda pending: torch.Size(pending.out_shape).numel()),
    **dict.fromkeys(
        (Tensor.is_floating_point, torch.is_floating_point),
        lambda pending: pending.form.dtype.is_floating_point,
    ),
    **dict.fromkeys(
        [getattr(Tensor, name).__get__ for name in ("is_cuda", "is_sparse", "is_nested", "requires_grad")],
        lambda pending, *_: False,
    ),
}


@cache
def tensor_class(real_class: type) -> type:
    """The class of deferred tensors that become ``real_class``: Tensor, or torchvision's Image."""
    properties = {name: _metadata_property(name) for name in ("shape", "ndim", "dtype", "device")}
    kind = type(
        "DeferredTensor",
        (_Deferred, real_class) if real_class is not Tensor else (_Deferred,),
        {"real_class": real_class, **properties},
    )
    CLASSES.add(kind)
    return kind


@cache
def pil_image_class() -> type:
    """The class of deferred PIL images. Called only if the program has imported PIL."""
    from PIL.Image import Image

    class DeferredImage(Image):
        """All attributes except size and mode come from the computed image."""

        real_class = Image

        def __getattribute__(self, name: str) -> Any:
            if name in ("__class__", "__dict__"):
                return Image if name == "__class__" else super().__getattribute__(name)
            pending = vars(self)["pending"]
            if name == "pending":
                return pending
            if name in ("size", "mode") and pending.metadata_known:
                return (
                    (pending.out_shape.width, pending.out_shape.height)
                    if name == "size"
                    else pending.form.mode
                )
            pending.recorder.on_access(self)
            return getattr(self, name)

        def __setattr__(self, name: str, value: object) -> None:
            vars(self)["pending"].recorder.on_access(self)
            Image.__setattr__(self, name, value)

        def __reduce_ex__(self, protocol: object) -> Any:
            vars(self)["pending"].recorder.on_access(self)
            return self.__reduce_ex__(protocol)

        def __eq__(self, other: object) -> bool:
            vars(self)["pending"].recorder.on_access(self)
            return bool(self == other)

        __hash__ = None  # type: ignore[assignment]  # as in PIL

    CLASSES.add(DeferredImage)
    return DeferredImage


def deferred_image(pending: Pending) -> Any:
    form = pending.form
    if form.kind == "pil":
        image: Any = object.__new__(pil_image_class())
        vars(image)["pending"] = pending
    else:
        image = Tensor._make_subclass(
            tensor_class(sys.modules["torchvision.tv_tensors"].Image if form.tv else Tensor), EMPTY
        )
        image.pending = pending
    return image


def is_deferred(thing: object) -> bool:
    return type(thing) in CLASSES


def materialize(image: Any, value: Any) -> None:
    """Turn the deferred image into ``value``: a tensor with its own memory, or a PIL image."""
    if not is_deferred(image):  # a compiler has accessed it in between
        return
    attributes, real_class = vars(image), type(image).real_class
    del attributes["pending"]
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            image.data = value
        image.__class__ = real_class
    else:
        attributes.update(vars(value))
        object.__dict__["__class__"].__set__(image, real_class)


def stack_deferred(images: Sequence[Any]) -> Tensor | None:
    """The batch of deferred tensors of one recorder, or None if any image is not one."""
    if not isinstance(images, (list, tuple)) or not images or not all(map(is_deferred, images)):
        return None
    recorder = images[0].pending.recorder
    if any(image.pending.recorder is not recorder for image in images):
        return None
    batch: Tensor | None = recorder.stack(images)
    return batch


def collate_deferred(batch: Sequence[Any], *, collate_fn_map: object = None) -> Tensor:
    """Collate tensors as torch does, if the first one is deferred."""
    batch_tensor = stack_deferred(list(batch))
    if batch_tensor is not None:
        return batch_tensor
    from torch.utils.data._utils.collate import collate_tensor_fn

    access(batch)
    collated: Tensor = collate_tensor_fn(list(batch), collate_fn_map=collate_fn_map)
    return collated


def access(thing: object) -> None:
    """Compute the deferred images in nested lists, tuples and dictionaries."""
    for image in filter(is_deferred, leaves(thing)):
        image.pending.recorder.on_access(image)


def leaves(thing: object, depth: int = 0) -> Iterator[Any]:
    """Yield what nested lists, tuples and dictionaries hold, in order, also those of other classes."""
    if depth < MAX_DEPTH and isinstance(thing, (list, tuple, dict)):
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from leaves(part, depth + 1)
    else:
        yield thing
