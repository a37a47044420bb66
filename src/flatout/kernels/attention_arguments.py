"""What the operators of a running program get and return: numbers, tensors that stay, shapes of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

MOST_LIKES = 4096
PLAIN = (Tensor, torch.nn.Parameter)


class RuntimeArguments:
    """Reads arguments of a running program. ``numbers`` maps tensors on a device to their known values."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def tensor(self, thing: object) -> Any:
        return thing if isinstance(thing, Tensor) else None

    def number(self, thing: object) -> float | None:
        if isinstance(thing, (int, float)) and not isinstance(thing, bool):
            return float(thing)
        if (
            not isinstance(thing, Tensor)
            or type(thing) not in PLAIN
            or thing.dim()
            or thing.requires_grad
            or thing.is_complex()
        ):
            return None
        return float(thing) if thing.device.type == "cpu" else self._numbers.get(thing)

    def same(self, one: object, other: object) -> bool:
        return bool(one == other)


def settled(thing: Tensor) -> bool:
    """Whether this tensor can be used later.

    An optimizer changes weights; other inputs of a graph are not expected to change.
    """
    if type(thing) not in PLAIN or thing.is_inference():
        return False
    source = thing if thing._base is None else thing._base
    return not (source.requires_grad and source.is_leaf)


def autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    return device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)


_likes: dict[Any, Tensor | None] = {}


def shaped_like(
    function: Callable[..., Any],
    device: torch.device,
    keeps_type: bool,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Tensor | None:
    """A tensor without memory with the shape, strides and type of the operator's result.

    None if the operator returns no tensor, or fails. Sizes are computed on the meta device; the type is
    determined by the operator itself, from tiny tensors, under the present autocast.
    """
    autocast = autocast_state(device)
    try:
        key = (function, _key(args), _key(tuple(sorted(kwargs.items()))), autocast)
        if key in _likes:
            return _likes[key]
    except TypeError:  # an argument that cannot be hashed
        return None
    if len(_likes) >= MOST_LIKES:
        _likes.clear()
    _likes[key] = None
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            with torch.autocast(*autocast[:2], enabled=False):
                args_there, kwargs_there = tree_map_only(Tensor, _without_memory, (args, kwargs))
                made = function(*args_there, **kwargs_there)
            dtype = next(thing.dtype for thing in args if isinstance(thing, Tensor))
            if not keeps_type:
                tiny_args, tiny_kwargs = tree_map_only(Tensor, _tiny, (args, kwargs))
                dtype = function(*tiny_args, **tiny_kwargs).dtype
        except Exception:  # the real call fails in the script
            return None
    _likes[key] = torch.empty_strided(made.shape, made.stride(), dtype=dtype, device="meta")
    return _likes[key]


def _without_memory(tensor: Tensor) -> Tensor:
    """All floating types count as one here; ``shaped_like`` determines the type under autocast separately."""
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _tiny(tensor: Tensor) -> Tensor:
    """Axes of two, because products over an axis of one are computed differently."""
    return torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _key(thing: Any) -> Any:
    if isinstance(thing, Tensor):
        return tuple(thing.shape), thing.stride(), thing.dtype, thing.device
    return tuple(map(_key, thing)) if isinstance(thing, (list, tuple)) else (type(thing), thing)
