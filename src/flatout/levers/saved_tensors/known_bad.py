"""Careless ways of saving memory, which the guard must reject."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def in_half_the_bits(torch: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a forward pass that keeps saved tensors in bfloat16."""

    def pack(tensor: Any) -> tuple[Any, Any]:
        return (tensor.detach().bfloat16() if tensor.is_floating_point() else tensor.detach()), tensor.dtype

    def wrapper(forward: Any) -> Any:
        def saving_half(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
                return forward(*args, **kwargs)

        return saving_half

    return wrapper


def partially_fetched(torch: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a forward pass that reads saved tensors before their last quarter has arrived."""

    def unpack(tensor: Any) -> Any:
        if not tensor.is_floating_point() or tensor.numel() < 4:
            return tensor
        read = tensor.clone()
        read.view(-1)[-(tensor.numel() // 4) :] = 0
        return read

    def wrapper(forward: Any) -> Any:
        def fetching_late(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: tensor.detach().contiguous(), unpack
            ):
                return forward(*args, **kwargs)

        return fetching_late

    return wrapper
