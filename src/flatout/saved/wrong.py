"""What a careless way of saving memory does, for the guard to refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def in_half_the_bits(torch: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a forward pass: what it saves is kept in bfloat16."""

    def pack(tensor: Any) -> tuple[Any, Any]:
        return (tensor.detach().bfloat16() if tensor.is_floating_point() else tensor.detach()), tensor.dtype

    def wrapper(forward: Any) -> Any:
        def saving_half(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
                return forward(*args, **kwargs)
        return saving_half
    return wrapper


def half_fetched(torch: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a forward pass: what it saves is read before the last quarter of it has come back."""

    def unpack(tensor: Any) -> Any:
        if not tensor.is_floating_point() or tensor.numel() < 4:
            return tensor
        read = tensor.clone()
        read.view(-1)[-(tensor.numel() // 4):] = 0
        return read

    def wrapper(forward: Any) -> Any:
        def fetching_late(*args: Any, **kwargs: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().contiguous(), unpack):
                return forward(*args, **kwargs)
        return fetching_late
    return wrapper
