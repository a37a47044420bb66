"""Careless ways of saving memory, which the guard must reject."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.schema.lever import Undo, Value

if TYPE_CHECKING:
    from torch import Tensor

    from flatout.schema.program import Ledger, TrainingContext


def in_half_the_bits(context: TrainingContext, value: Value, ledger: Ledger) -> Undo:
    """Keeps saved tensors in bfloat16."""
    torch = context.torch

    def pack(tensor: Tensor) -> tuple[Any, Any]:
        return (tensor.detach().bfloat16() if tensor.is_floating_point() else tensor.detach()), tensor.dtype

    def wrapper(forward: Callable[..., Any]) -> Any:
        def saving_half(*args: object, **kwargs: object) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed[0].to(packed[1])):
                return forward(*args, **kwargs)

        return saving_half

    for root in context.roots:
        context.wrap_forward(context.without_ranks(root), wrapper, ledger)
    return ledger.restore


def partially_fetched(torch: ModuleType) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A wrapper of a forward pass that reads saved tensors before their last quarter has arrived."""

    def unpack(tensor: Tensor) -> Any:
        if not tensor.is_floating_point() or tensor.numel() < 4:
            return tensor
        read = tensor.clone()
        read.view(-1)[-(tensor.numel() // 4) :] = 0
        return read

    def wrapper(forward: Callable[..., Any]) -> Any:
        def fetching_late(*args: object, **kwargs: object) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor: tensor.detach().contiguous(), unpack
            ):
                return forward(*args, **kwargs)

        return fetching_late

    return wrapper
