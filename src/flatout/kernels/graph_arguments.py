"""Arguments and outputs of a recorded pass: arguments by layout, outputs that can be returned as copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

if TYPE_CHECKING:
    from torch import Tensor

SIMPLE = (type(None), bool, int, float, str, torch.dtype, torch.device)


class NotRecordable(Exception):
    """Why a pass cannot be recorded. The message continues the words "the forward pass"."""


def layout(value: Any, tensors: list[Any]) -> Any:
    """The properties that two calls must share to use one recording; appends the tensors to ``tensors``.

    Raises NotRecordable for values that are neither tensors, numbers nor containers.
    """
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        if not value.is_cuda or value.layout != torch.strided:
            raise NotRecordable("takes a tensor that is not on the device")
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if kind in SIMPLE:
        return kind, value
    if kind is tuple or kind is list:
        return kind, tuple([layout(each, tensors) for each in value])
    if kind is dict:
        return kind, tuple([(name, layout(each, tensors)) for name, each in value.items()])
    raise NotRecordable(f"takes a {kind.__name__}")


def filled(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same arguments with these tensors."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(filled(each, tensors) for each in value)
    if kind is dict:
        return {name: filled(each, tensors) for name, each in value.items()}
    return next(tensors) if isinstance(value, torch.Tensor) or value is _TENSOR else value


def like(tensor: Tensor) -> Any:
    """A leaf with the same values, strides and requires_grad."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


class _TensorPlaceholder:
    """A placeholder for a tensor in arguments that are kept without tensors."""


_TENSOR = _TensorPlaceholder()


def emptied(value: Any) -> Any:
    """The same arguments without their tensors."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(emptied(each) for each in value)
    if kind is dict:
        return {name: emptied(each) for name, each in value.items()}
    return _TENSOR if isinstance(value, torch.Tensor) else value


def why_not_outputs(leaves: list[Any], sources: list[Any]) -> str:
    """Why outputs cannot be returned as copies; "" if they can."""
    taken = {tensor.untyped_storage().data_ptr() for tensor in sources if tensor.numel()}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) not in SIMPLE:
                return f"returns a {type(leaf).__name__}"
            continue
        if type(leaf) is not torch.Tensor or not leaf.is_cuda or leaf.layout != torch.strided:
            return f"returns a {type(leaf).__name__} on {leaf.device.type}"
        memory = leaf.untyped_storage().data_ptr()
        if leaf.numel() and memory in taken:
            return "returns a part of its inputs, of its weights, or the same memory twice"
        if torch.empty_like(leaf).stride() != leaf.stride():
            return "returns a tensor whose elements overlap or have gaps"
        taken.add(memory)
    return ""


def tensors_of(nest: object) -> list[Any]:
    """The tensors in containers, in order."""
    return [leaf for leaf in _pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
