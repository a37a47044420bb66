"""Tracks from which weights a tensor was computed.

With these gradient sources, a replayed backward pass leaves fake gradients where the real one leaves
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from torch import Tensor
    from torch import device as Device


# Fake tensors of a replay: shape, strides, dtype and device without values.
#
# A fake tensor knows from which weights it was computed. `fake_operators` answers functions of it. A fake tensor that
# still has no values after the resume point rejects every operation.

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


MAX_UNIONS = 4096


class GradientSources:
    def __init__(self) -> None:
        self._unions: dict[tuple[frozenset[Any], frozenset[Any]], frozenset[Any]] = {}

    def of(self, value: Any) -> frozenset[Any]:
        kind = type(value)
        if kind is ReplayTensor:
            return value.sources
        if isinstance(value, torch.Tensor):
            return frozenset((ById(value),)) if value.requires_grad else NO_SOURCES
        sources = NO_SOURCES
        if kind in (list, tuple):
            for item in value:
                sources = self.union(sources, self.of(item))
        return sources

    def add_sources(self, result: object, inputs: Iterable[Any]) -> Any:
        """Add the gradient sources of the inputs to the fake tensors in the result."""
        sources = self.of(list(inputs)) if torch.is_grad_enabled() else NO_SOURCES
        for output in (
            (result,) if isinstance(result, torch.Tensor) else result if isinstance(result, tuple) else ()
        ):
            if type(output) is ReplayTensor and output.spec.dtype.is_floating_point:
                output.sources = self.union(output.sources, sources)
        return result

    def union(self, a: frozenset[Any], b: frozenset[Any]) -> frozenset[Any]:
        if not b or a is b:
            return a
        if not a:
            return b
        union = self._unions.get((a, b))
        if union is None:
            if len(self._unions) > MAX_UNIONS:
                self._unions.clear()
            union = self._unions[a, b] = a | b
        return union

    def set_gradients(self, tensors: Iterable[Any], inputs: Iterable[Any] | None) -> None:
        """Set fake gradients where a backward pass from these tensors would set gradients."""
        sources = NO_SOURCES
        for tensor in tensors:
            sources = self.union(sources, self.of(tensor))
        wanted = None if inputs is None else {id(tensor) for tensor in inputs}
        for source in sources:
            leaf = source.tensor
            if (
                type(leaf) is not ReplayTensor
                and leaf.grad is None
                and (wanted is None or id(leaf) in wanted)
            ):
                leaf.grad = ReplayTensor(spec_of(leaf))

    def grads(self, outputs: Any, inputs: Any) -> tuple[Any, ...]:
        """Replaces `torch.autograd.grad`."""
        sources = NO_SOURCES
        for output in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
            sources = self.union(sources, self.of(output))
        return tuple(
            ReplayTensor(spec_of(tensor), sources)
            for tensor in ((inputs,) if isinstance(inputs, torch.Tensor) else inputs)
        )


class ById:
    """A tensor as a member of a set, compared by identity."""

    __slots__ = ("key", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.key = tensor, id(tensor)

    def __hash__(self) -> int:
        return self.key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.key == self.key


class GradFn:
    """Stands in for a node of autograd's graph."""

    next_functions = ()

    def __call__(self, *args: object) -> None:
        return None

    def name(self) -> str:
        return "ReplayTensor"

    def register_hook(self, hook: object) -> Handle:
        return Handle()

    register_prehook = register_hook


class Handle:
    """Handle of a hook that is never called, since a replay has no backward pass."""

    def remove(self) -> None: ...
