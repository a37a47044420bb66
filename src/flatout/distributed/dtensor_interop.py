"""DTensor interoperation: use sharded weights together with whole tensors.

Examples are an average of weights, a penalty, a product outside any module, or a print. FSDP2's weights are
DTensors, and torch does not mix those with plain tensors. This module gathers the sharded tensor for the
operation, on every rank alike (each rank runs the whole script, so all take part). Its gradient, which
differs between ranks, is averaged and sharded again. In-place operations keep the tensor's kind: a sharded
weight takes its own part of a whole tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from flatout.schema.program import Ledger

# Functions that return no tensor. torch 2.14 returns each rank's part of a partial sum, not the sum.
NO_TENSOR = (
    "item",
    "tolist",
    "numpy",
    "is_nonzero",
    "__float__",
    "__int__",
    "__bool__",
    "__index__",
    "__complex__",
    "__contains__",
    "__array__",
    "__format__",
    "__reduce_ex__",
    "__repr__",
)
IN_PLACE = ("__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__")  # the first sets .data or .grad


class DTensorInterop:
    def __init__(self, torch: ModuleType, world: int, ledger: Ledger) -> None:
        from torch.distributed.tensor import DTensor

        self.torch, self.world, self.dtensor_class = torch, world, DTensor
        self.no_dispatch = torch._C.DisableTorchFunctionSubclass
        tensor = torch.Tensor
        self.no_tensor = {getattr(tensor, name) for name in NO_TENSOR}
        interop = self

        def function(cls: object, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            return interop._dispatch(func, args, kwargs or {})

        ledger.set(DTensor, "__torch_function__", classmethod(function))
        ledger.set(DTensor, "__repr__", lambda tensor, **options: interop._repr(tensor))
        self._stand_in = _stand_in_class(torch)

    # -- sharded and whole tensors

    def is_sharded(self, value: object) -> bool:
        return isinstance(value, self.dtensor_class)

    def whole(self, tensor: Tensor) -> Any:
        """The whole tensor on every rank; a Parameter of a Parameter.

        Its gradient is averaged over ranks and sharded."""
        from torch.distributed.tensor import Partial

        torch = self.torch
        with self.no_dispatch():
            if not torch.is_grad_enabled() or not tensor.requires_grad:
                whole = tensor.detach().full_tensor()
                is_parameter = getattr(tensor, "_is_param", False)
                return torch.nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole
            whole = tensor.full_tensor(grad_placements=[Partial()] * tensor.device_mesh.ndim)
        whole.register_hook(lambda gradient: gradient / self.world)
        return whole

    def part_of(self, whole: Tensor, like: object) -> Any:
        """This rank's part of a whole tensor, sharded as ``like``; it keeps no memory of the whole."""
        with self.no_dispatch(), self.torch.no_grad():
            part = self.torch.zeros_like(like, dtype=whole.dtype)
            local = part._local_tensor
            start = self._start(like)
            if local.numel():
                local.copy_(whole.detach().narrow(0, start, local.shape[0]))
            return part

    def _start(self, like: DTensor) -> int:
        """The first row of this rank's part: FSDP2 splits rows as torch.chunk does."""
        mesh = like.device_mesh
        dim = mesh.ndim - 1
        rows, ranks = like.shape[0], mesh.size(dim)
        return min(rows, -(-rows // ranks) * mesh.get_local_rank(dim))

    def stand_in(self, whole: Tensor, sharded: object) -> None:
        """Empty a weight that may still be referenced, and make it a stand-in for the sharded one."""
        whole.data = whole.data.new_empty(0)
        vars(whole).clear()
        vars(whole)["sharded"] = sharded
        whole.__class__ = self._stand_in

    # -- calls with a sharded tensor among their arguments

    def _dispatch(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func in self.no_tensor:
            with self.torch.no_grad():
                return func(self.whole(args[0]), *args[1:], **kwargs)
        if func is self.torch.Tensor.__deepcopy__:
            return self._deepcopy(*args)
        if func is self.torch.Tensor.__setitem__ and self.is_sharded(args[0]):
            return self._setitem(*args)
        name = getattr(func, "__name__", "")
        if name == "__get__":  # an attribute
            with self.no_dispatch():
                return func(*args)
        if name.startswith(("_foreach_", "_amp_foreach_")):
            return self._call_foreach(func, args, kwargs)
        return self._call_single(func, name, args, kwargs)

    def _call_single(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        from torch.utils._pytree import tree_leaves, tree_map_only

        has_plain = any(map(self._is_plain, tree_leaves((args, kwargs))))
        in_place = name in IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if in_place and has_plain and args and self.is_sharded(args[0]):
            cut = partial(self._part_if_whole, like=args[0])
            args, kwargs = tree_map_only(self.torch.Tensor, cut, (tuple(args), kwargs))
            has_plain = False
        if not has_plain:
            try:
                with self.no_dispatch():
                    return func(*args, **kwargs)
            except (RuntimeError, NotImplementedError) as error:
                # otherwise unsupported on shards (a view across them), on every rank alike
                if in_place or isinstance(error, self.torch.OutOfMemoryError):
                    raise
        args, kwargs = tree_map_only(self.torch.Tensor, self._whole_if_sharded, (tuple(args), kwargs))
        with self.no_dispatch():
            return func(*args, **kwargs)

    def _call_foreach(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        first = args[0]
        results: dict[int, Any] = {}
        for sharded in (True, False):
            indices = [number for number, tensor in enumerate(first) if self.is_sharded(tensor) is sharded]
            if not indices:
                continue
            selected = [self._select(arg, indices, len(first)) for arg in args]
            options = {name: self._select(arg, indices, len(first)) for name, arg in kwargs.items()}
            for position, arg in enumerate(selected):
                if isinstance(arg, list) and not sharded:
                    selected[position] = list(map(self._whole_if_sharded, arg))
                elif isinstance(arg, list) and position:
                    likes = zip(arg, selected[0], strict=True)
                    selected[position] = [self._part_if_whole(value, like) for value, like in likes]
            with self.no_dispatch():
                output = func(*selected, **options)
            results.update(zip(indices, output, strict=True) if output is not None else ())
        return [results[number] for number in range(len(first))] if results else None

    @staticmethod
    def _select(arg: Any, indices: list[int], length: int) -> Any:
        is_row = isinstance(arg, (list, tuple)) and len(arg) == length
        return [arg[number] for number in indices] if is_row else arg

    def _is_plain(self, value: Any) -> bool:
        is_plain = isinstance(value, self.torch.Tensor) and not self.is_sharded(value)
        return is_plain and (value.dim() > 0 or value.requires_grad)

    def _whole_if_sharded(self, value: Any) -> Any:
        return self.whole(value) if self.is_sharded(value) else value

    def _part_if_whole(self, value: Any, like: DTensor) -> Any:
        return self.part_of(value, like) if self._is_plain(value) and value.shape == like.shape else value

    def _repr(self, tensor: Tensor) -> str:
        with self.torch.no_grad():
            return repr(self.whole(tensor))

    def _deepcopy(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            with self.torch.no_grad():
                memo[id(tensor)] = copy.deepcopy(self.whole(tensor))
        return memo[id(tensor)]

    def _setitem(self, tensor: Tensor, index: object, value: object) -> None:
        """``weight[where] = value``: torch would write to a copy of the other ranks' rows."""
        with self.torch.no_grad():
            whole = self.whole(tensor).detach()
            whole[index] = self._whole_if_sharded(value)
            with self.no_dispatch():
                tensor.copy_(self.part_of(whole, tensor))


def _stand_in_class(torch: Any) -> type:
    from torch.utils._pytree import tree_map_only

    class StandInParameter(torch.nn.Parameter):
        """The former whole weight: remaining references to it delegate to the sharded one."""

        @classmethod
        def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
            args, kwargs = tree_map_only(
                cls, lambda stand_in: vars(stand_in)["sharded"], (tuple(args), kwargs or {})
            )
            return func(*args, **kwargs)

    return StandInParameter
