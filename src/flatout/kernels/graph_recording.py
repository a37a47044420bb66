"""What recordings need: the capture of one CUDA graph, arguments by layout, outputs that can be copied."""

import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import device as Device
from torch.utils import _pytree

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
SIMPLE_TYPES = (type(None), bool, int, float, str, torch.dtype, torch.device)
_streams: dict[int, Any] = {}


class CaptureState:
    """Active while anything is being recorded.

    A module called inside another module's recording runs eagerly.
    """

    active = False


@contextmanager
def capture(graph: object, device: Device, pool: object) -> Iterator[None]:
    """Record the launches of the body on ``device`` into ``graph``.

    Raises the error of CUDA or torch if that fails. Other threads may use the device meanwhile
    ("thread_local"): loaders pin memory in a thread.
    """
    gc_enabled, CaptureState.active = gc.isenabled(), True
    gc.disable()  # a capture does not permit freeing a tensor or an event
    try:
        with torch.cuda.device(device):
            if device.index not in _streams:
                _streams[device.index] = torch.cuda.Stream(device)
            stream = _streams[device.index]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                yield
            torch.cuda.current_stream(device).wait_stream(stream)
    finally:
        CaptureState.active = False
        if gc_enabled:
            gc.enable()


def brief(error: Exception) -> str:
    """The first line of its message, cut to 160 characters, or its name."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def unwrapped_grad() -> Any:
    """``torch.autograd.grad`` without wrappers: observers of the script's calls must not record ours."""
    return inspect.unwrap(torch.autograd.grad)


class StreamOrder:
    """Orders the launches of one graph if the script changes the current stream between them."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._last_stream: Any = None

    def wait(self) -> None:
        current = torch.cuda.current_stream(self.device)
        if self._last_stream is not None and current != self._last_stream:
            current.wait_stream(self._last_stream)
        self._last_stream = current


class NotRecordable(Exception):
    """Why a pass cannot be recorded. The message continues the words "the forward pass"."""


def layout_key(value: Any, tensors: list[Any]) -> Any:
    """The properties that two calls must share to use one recording; appends the tensors to ``tensors``.

    Raises NotRecordable for values that are neither tensors, numbers nor containers.
    """
    type_ = type(value)
    if type_ is torch.Tensor or type_ is torch.nn.Parameter:
        if not value.is_cuda or value.layout != torch.strided:
            raise NotRecordable("takes a tensor that is not on the device")
        tensors.append(value)
        return value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if type_ in SIMPLE_TYPES:
        return type_, value
    if type_ is tuple or type_ is list:
        return type_, tuple([layout_key(item, tensors) for item in value])
    if type_ is dict:
        return type_, tuple([(name, layout_key(item, tensors)) for name, item in value.items()])
    raise NotRecordable(f"takes a {type_.__name__}")


def with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    """The same arguments with these tensors."""
    return _pytree.tree_map_only((torch.Tensor, _TensorPlaceholder), lambda _: next(tensors), value)


def copy_leaf(tensor: Tensor) -> Any:
    """A leaf with the same values, strides and requires_grad."""
    leaf = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return leaf.copy_(tensor.detach()).requires_grad_(tensor.requires_grad)


class _TensorPlaceholder:
    """A placeholder for a tensor in arguments that are kept without tensors."""


def without_tensors(value: Any) -> Any:
    """The same arguments with a placeholder for each tensor."""
    return _pytree.tree_map_only(torch.Tensor, lambda _: _TensorPlaceholder(), value)


def why_not_copyable(leaves: list[Any], sources: list[Any]) -> str:
    """Why outputs cannot be returned as copies; "" if they can."""
    used_memory = {tensor.untyped_storage().data_ptr() for tensor in sources if tensor.numel()}
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            if type(leaf) not in SIMPLE_TYPES:
                return f"returns a {type(leaf).__name__}"
            continue
        if type(leaf) is not torch.Tensor or not leaf.is_cuda or leaf.layout != torch.strided:
            return f"returns a {type(leaf).__name__} on {leaf.device.type}"
        address = leaf.untyped_storage().data_ptr()
        if leaf.numel() and address in used_memory:
            return "returns a part of its inputs, of its weights, or the same memory twice"
        if torch.empty_like(leaf).stride() != leaf.stride():
            return "returns a tensor whose elements overlap or have gaps"
        used_memory.add(address)
    return ""


def tensors_of(nest: object) -> list[Any]:
    """The tensors in containers, in order."""
    return [leaf for leaf in _pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)]
