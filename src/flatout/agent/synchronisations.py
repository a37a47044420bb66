"""Counts device synchronisations: places where tensors wait for Python, or Python for tensors.

It hooks torch's own functions while installed. Nested calls count once, as the outermost. If the model trains
on a device, only tensors on a device count. On a CPU nothing waits for a device; the same places are counted,
except calls of torch's own code and of the loader on host tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.frames import Line, is_torch, place_of, user_line
from flatout.agent.ledger import Ledger
from flatout.schema.profile import SyncRecord

if TYPE_CHECKING:
    from torch import Tensor


# Records indexing with a mask at torch's dispatcher.
#
# `Tensor.__getitem__` must not be replaced. A class with such a Python function stays a sequence for C code for
# ever, even after the function is removed. Then `torch.tensor([loss])` asks a loss for its length and fails.

MASKS = "bool", "uint8"  # dtypes of masks, as opposed to indices
Observer = Callable[[Callable[[], Any], Any, FrameType], Any]


def observe_masks(
    torch: ModuleType,
    ledger: Ledger,
    on_mask: Observer,
) -> None:
    """Hook indexing by tensors.

    ``on_mask(original, mask, frame)`` replaces each indexing with a mask; ``mask`` is the first tensor of a mask
    dtype, ``frame`` the calling frame, and ``original()`` does the indexing. Indexing by tensors costs 4 us more;
    indexing by numbers and slices costs nothing.
    """
    index, masks = torch.ops.aten.index.Tensor, tuple(getattr(torch, name) for name in MASKS)
    # Below autograd and above the devices: all tensors pass this dispatch key, and no kernel is registered
    # there.
    key = torch._C.DispatchKey.BackendSelect
    lower_keys = torch._C._dispatch_keyset_full_after(key)

    def kernel(keys: object, tensor: Tensor, indices: Sequence[Any]) -> Any:
        for position in indices:
            if position is not None and position.dtype in masks and not position.is_meta:
                return on_mask(
                    lambda: index.redispatch(keys & lower_keys, tensor, indices), position, sys._getframe(1)
                )
        return index.redispatch(keys & lower_keys, tensor, indices)

    library = torch.library.Library("aten", "IMPL")
    library.impl("index.Tensor", kernel, key.name, with_keyset=True)
    ledger.on_restore("aten::index", library._destroy)


def has_mask(index: object) -> bool:
    """Whether an index contains a mask, so that the number of results depends on values. Raises nothing."""
    if isinstance(index, (tuple, list)):
        return any(map(has_mask, index)) or (
            isinstance(index, list) and any(isinstance(part, bool) for part in index)
        )
    return str(getattr(index, "dtype", "")).removeprefix("torch.") in MASKS and getattr(index, "ndim", 0) > 0


Function = Callable[..., Any]
METHODS = {
    "item": "item",
    "tolist": "item",
    "__bool__": "item",
    "__float__": "item",
    "__int__": "item",
    "__index__": "item",
    "__complex__": "item",
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "unique": "nonzero",
    "masked_select": "nonzero",
    "numpy": "numpy",
    "__array__": "numpy",
    "cpu": "to host",
    "__repr__": "print",
    "__format__": "print",
    "equal": "compare",
    "allclose": "compare",
}
FUNCTIONS = ("nonzero", "argwhere", "unique", "masked_select", "equal", "allclose")
MOVE_METHODS = ("to", "cuda")
CONSTRUCTORS = ("tensor", "as_tensor")


@dataclass
class _Total:
    calls: int = 0
    ns: int = 0
    bytes: int = 0


class SyncRecorder:
    """Hooks synchronising functions.

    ``now_ns``: the host clock. ``fetching()``: whether the loader works in this thread.
    """

    def __init__(
        self,
        torch: ModuleType,
        ledger: Ledger,
        device_type: str,
        now_ns: Callable[[], int],
        fetching: Callable[[], bool],
    ) -> None:
        self.torch, self.ledger, self.device_type, self.now_ns = torch, ledger, device_type, now_ns
        self.fetching = fetching
        self._totals: dict[tuple[str, Line | None, bool | None, bool | None], _Total] = {}
        self._in_hook = False

    def install(self) -> None:
        torch = self.torch
        for name, kind in METHODS.items():
            self.ledger.set(torch.Tensor, name, self._wrap(getattr(torch.Tensor, name), kind))
        observe_masks(torch, self.ledger, self._on_mask)
        for name in FUNCTIONS:
            self.ledger.set(torch, name, self._wrap(getattr(torch, name), METHODS[name]))
        self.ledger.set(torch, "where", self._wrap_where(torch.where))
        for name in MOVE_METHODS:
            self.ledger.set(torch.Tensor, name, self._wrap_move(getattr(torch.Tensor, name)))
        if self.device_type == "cpu":
            return
        for name in CONSTRUCTORS:
            self.ledger.set(torch, name, self._wrap_constructor(getattr(torch, name)))
        if self.device_type == "cuda":
            for owner in (torch.cuda, torch.cuda.Event, torch.cuda.Stream):
                self.ledger.set(owner, "synchronize", self._wrap_synchronize(owner.synchronize))

    def records(self, steps: int) -> list[SyncRecord]:
        """Return the synchronisations recorded in ``steps`` steps, the most expensive first."""
        records = [
            SyncRecord(
                kind,
                place_of(line),
                total.calls / steps,
                total.ns / 1e6 / steps,
                total.bytes / steps,
                pinned,
                non_blocking,
            )
            for (kind, line, pinned, non_blocking), total in self._totals.items()
        ]
        return sorted(records, key=lambda synchronisation: -synchronisation.ms)

    # -- wrappers

    def _counts(self, tensor: Tensor, caller: FrameType) -> bool:
        if self._in_hook or not isinstance(tensor, self.torch.Tensor) or self.torch.compiler.is_compiling():
            return False
        if self.device_type != "cpu":
            return bool(tensor.device.type != "cpu")
        return not is_torch(caller.f_code.co_filename) and not self.fetching()

    def _measure(
        self,
        kind: str,
        caller: FrameType,
        original: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensor: Tensor | None = None,
        **details: bool | None,
    ) -> Any:
        self._in_hook = True
        start = self.now_ns()
        try:
            return original(*args, **kwargs)
        finally:
            self._add(kind, caller, self.now_ns() - start, tensor, **details)
            self._in_hook = False

    def _add(
        self,
        kind: str,
        caller: FrameType,
        ns: int,
        tensor: Tensor,
        pinned: bool | None = None,
        non_blocking: bool | None = None,
    ) -> None:
        total = self._totals.setdefault((kind, user_line(caller), pinned, non_blocking), _Total())
        total.calls += 1
        total.ns += ns
        total.bytes += (
            tensor.numel() * tensor.element_size()
            if tensor is not None and tensor.layout == self.torch.strided
            else 0
        )

    def _wrap(self, original: Function, kind: str) -> Function:
        @wraps(original)
        def observed(tensor: Tensor = None, *args: object, **kwargs: object) -> Any:
            if tensor is None:
                return original(*args, **kwargs)
            caller = sys._getframe(1)
            if not self._counts(tensor, caller):
                return original(tensor, *args, **kwargs)
            return self._measure(kind, caller, original, (tensor, *args), kwargs, tensor)

        return observed

    def _on_mask(self, original: Callable[[], Any], mask: Tensor, caller: FrameType) -> Any:
        return (
            self._measure("nonzero", caller, original, (), {}, mask)
            if self._counts(mask, caller)
            else original()
        )

    def _wrap_where(self, original: Function) -> Function:
        @wraps(original)
        def found(condition: object, *args: object, **kwargs: object) -> Any:
            if args or kwargs or not self._counts(condition, sys._getframe(1)):
                return original(condition, *args, **kwargs)
            return self._measure("nonzero", sys._getframe(1), original, (condition,), {}, condition)

        return found

    def _wrap_move(self, original: Function) -> Function:
        @wraps(original)
        def moved(tensor: Tensor, *args: object, **kwargs: object) -> Any:
            if self._in_hook or self.torch.compiler.is_compiling():
                return original(tensor, *args, **kwargs)
            start = self.now_ns()
            result = original(tensor, *args, **kwargs)
            ns = self.now_ns() - start
            if result.device.type != tensor.device.type:
                non_blocking = bool(
                    kwargs.get("non_blocking", False) or any(arg is True for arg in args[1:2])
                )
                if result.device.type == "cpu":
                    self._add("to host", sys._getframe(1), ns, tensor, non_blocking=non_blocking)
                else:
                    self._add("to device", sys._getframe(1), ns, tensor, tensor.is_pinned(), non_blocking)
            return result

        return moved

    def _wrap_constructor(self, original: Function) -> Function:
        @wraps(original)
        def made(data: object, *args: object, **kwargs: object) -> Any:
            start = self.now_ns()
            result = original(data, *args, **kwargs)
            if not self._in_hook and result.device.type != "cpu" and not isinstance(data, self.torch.Tensor):
                self._add("to device", sys._getframe(1), self.now_ns() - start, result, False, False)
            return result

        return made

    def _wrap_synchronize(self, original: Function) -> Function:
        @wraps(original)
        def waited(*args: object, **kwargs: object) -> Any:
            if self._in_hook:
                return original(*args, **kwargs)
            return self._measure("synchronize", sys._getframe(1), original, args, kwargs)

        return waited
