"""Fake tensors of a replay: shape, strides, dtype and device without values.

A fake tensor knows from which weights it was computed (`flatout.checkpoint.resume.gradient_sources`). `flatout.checkpoint.resume.fake_operators`
answers functions of it. A fake tensor that still has no values after the resume point rejects every
operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device

NO_SOURCES: frozenset[Any] = frozenset()


class TensorSpec(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any
    device: Any


class ReplayTensor(torch.Tensor):
    """A tensor without values. ``sources``: the weights from which it was computed with gradients enabled."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # the torch function mode answers
    spec: TensorSpec
    sources: frozenset[Any]

    @staticmethod
    def __new__(cls: object, spec: TensorSpec, sources: frozenset[Any] = NO_SOURCES) -> Any:
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, spec.size, strides=spec.stride, dtype=spec.dtype, device=spec.device
        )
        tensor.spec, tensor.sources = spec, sources
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: object, args: object = (), kwargs: object = None
    ) -> Any:
        """Handle an operation that bypassed the mode: from C++, or after the resume point."""
        return ReplayTensor.on_bypass(func, args, kwargs or {})

    @staticmethod
    def on_bypass(func: Callable[..., Any], args: object, kwargs: object) -> Any:
        """Answer, or do not return; the replay sets this method."""
        raise RuntimeError(f"{func} of a tensor that has no values")


def spec_of(tensor: Tensor) -> TensorSpec:
    """Return the spec of a tensor; for a sparse one that of its dense form, since its results are dense."""
    size = tuple(tensor.size())
    return TensorSpec(
        size,
        tensor.stride() if tensor.layout is torch.strided else contiguous_strides(size),
        tensor.dtype,
        tensor.device,
    )


def dense(shape: list[int], dtype: str, device: str) -> Any:
    """Build a dense fake tensor from the spelling in the value log."""
    return contiguous(tuple(shape), getattr(torch, dtype), torch.device(device))


def contiguous(size: tuple[int, ...], dtype: object, device: Device) -> Any:
    """Return a contiguous fake tensor."""
    return ReplayTensor(TensorSpec(size, contiguous_strides(size), dtype, device))


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the contiguous strides of a shape."""
    strides, size = [], 1
    for extent in reversed(shape):
        strides.append(size)
        size *= max(extent, 1)
    return tuple(reversed(strides))


def takes_gradient(spec: TensorSpec) -> bool:
    return bool(spec.dtype.is_floating_point or spec.dtype.is_complex)


def is_trained(value: Any, depth: int = 3) -> bool:
    """Whether the value belongs to training: a fake tensor, a weight, or a container with one."""
    kind = type(value)
    if kind is ReplayTensor or kind is torch.nn.Parameter:
        return True
    if kind is int or kind is float or value is None or kind is str or kind is bool:
        return False
    if isinstance(value, torch.Tensor):
        return value.requires_grad and not torch.nn.parameter.is_lazy(value)
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(is_trained(item, depth - 1) for item in value)
    return kind is dict and depth > 0 and any(is_trained(item, depth - 1) for item in value.values())


def has_fake(value: object, depth: int = 3) -> bool:
    """Whether the value is or contains a fake tensor."""
    if type(value) is ReplayTensor:
        return True
    if isinstance(value, (list, tuple)):
        return depth > 0 and any(has_fake(item, depth - 1) for item in value)
    return type(value) is dict and depth > 0 and any(has_fake(item, depth - 1) for item in value.values())


def tensors_in(value: object) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
