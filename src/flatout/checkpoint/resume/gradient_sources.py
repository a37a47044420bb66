"""Tracks from which weights a tensor was computed.

With these gradient sources, a replayed backward pass leaves fake gradients where the real one leaves
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from flatout.checkpoint.resume.fake_tensors import NO_SOURCES, ReplayTensor, spec_of

if TYPE_CHECKING:
    from torch import Tensor

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
