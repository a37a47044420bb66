"""What the operators of a running program get and return: numbers, tensors that stay, shapes of results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

MAX_CACHED_RESULTS = 4096
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


class RuntimeArguments:
    """Reads arguments of a running program. ``numbers`` maps tensors on a device to their known values."""

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers

    def tensor(self, arg: object) -> Any:
        return arg if isinstance(arg, Tensor) else None

    def number(self, arg: object) -> float | None:
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return float(arg)
        if (
            not isinstance(arg, Tensor)
            or type(arg) not in PLAIN_TENSORS
            or arg.dim()
            or arg.requires_grad
            or arg.is_complex()
        ):
            return None
        return float(arg) if arg.device.type == "cpu" else self._numbers.get(arg)

    def same(self, left: object, right: object) -> bool:
        return bool(left == right)


def is_usable_later(arg: Tensor) -> bool:
    """Whether this tensor can be used later.

    An optimizer changes weights; other inputs of a graph are not expected to change.
    """
    if type(arg) not in PLAIN_TENSORS or arg.is_inference():
        return False
    base = arg if arg._base is None else arg._base
    return not (base.requires_grad and base.is_leaf)


def autocast_state(device: torch.device) -> tuple[str, torch.dtype, bool]:
    return device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)


_empty_results: dict[Any, Tensor | None] = {}


def empty_result(
    function: Callable[..., Any],
    device: torch.device,
    keeps_dtype: bool,
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
        if key in _empty_results:
            return _empty_results[key]
    except TypeError:  # an argument that cannot be hashed
        return None
    if len(_empty_results) >= MAX_CACHED_RESULTS:
        _empty_results.clear()
    _empty_results[key] = None
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            with torch.autocast(*autocast[:2], enabled=False):
                meta_args, meta_kwargs = tree_map_only(Tensor, _without_memory, (args, kwargs))
                result = function(*meta_args, **meta_kwargs)
            dtype = next(arg.dtype for arg in args if isinstance(arg, Tensor))
            if not keeps_dtype:
                tiny_args, tiny_kwargs = tree_map_only(Tensor, _tiny, (args, kwargs))
                dtype = function(*tiny_args, **tiny_kwargs).dtype
        except Exception:  # the real call fails in the script
            return None
    _empty_results[key] = torch.empty_strided(result.shape, result.stride(), dtype=dtype, device="meta")
    return _empty_results[key]


def _without_memory(tensor: Tensor) -> Tensor:
    """All floating types count as one here; ``empty_result`` determines the type under autocast separately."""
    dtype = torch.float32 if tensor.dtype.is_floating_point else tensor.dtype
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")


def _tiny(tensor: Tensor) -> Tensor:
    """Axes of two, because products over an axis of one are computed differently."""
    return torch.zeros((2,) * tensor.dim(), dtype=tensor.dtype, device=tensor.device)


def _key(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype, arg.device
    return tuple(map(_key, arg)) if isinstance(arg, (list, tuple)) else (type(arg), arg)
