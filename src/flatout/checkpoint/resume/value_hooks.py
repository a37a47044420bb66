"""Hooks the functions of torch and `time` that return values to Python.

While recording, each such value is added to the value log. During a replay it is read from there. Shapes that
depend on values (`nonzero`, indexing with a mask) are handled the same way.
"""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from flatout.agent.frames import FLATOUT_DIR
from flatout.agent.ledger import Ledger
from flatout.agent.masks import observe_masks
from flatout.checkpoint.resume.clock_hooks import ClockHooks, RecordedClock
from flatout.checkpoint.resume.fake_tensors import ReplayTensor, dense
from flatout.checkpoint.resume.value_log import LargeValue, ValueLog, encoded

if TYPE_CHECKING:
    from torch import Tensor

VALUES = (
    "item",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__complex__",
    "is_nonzero",
    "equal",
    "allclose",
    "__repr__",
    "__format__",
    "numpy",
    "__array__",
    "__contains__",
)
SHAPES = (
    "nonzero",
    "argwhere",
    "unique",
    "unique_consecutive",
    "masked_select",
    "bincount",
    "repeat_interleave",
)
# The sample order follows from a seed, which is recorded, or from a generator of the script.
FROM_A_SEED = torch.utils.data.RandomSampler.__iter__.__code__
OF_DEVICES = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "mem_get_info",
)


class ValueHooks:
    """Records and replays values that reach Python."""

    def __init__(self, value_log: ValueLog, ledger: Ledger) -> None:
        self.value_log, self.ledger = value_log, ledger

    def install(self) -> None:
        ledger = self.ledger
        for name in VALUES:
            ledger.set(torch.Tensor, name, self._value(getattr(torch.Tensor, name)))
        for name in ("equal", "allclose", "is_nonzero"):
            ledger.set(torch, name, self._value(getattr(torch, name)))
        for name in SHAPES:
            for owner in (torch.Tensor, torch):
                if hasattr(owner, name):
                    ledger.set(owner, name, self._shape(getattr(owner, name)))
        ledger.set(torch, "where", self._places(torch.where))
        ledger.set(torch.nn.functional, "one_hot", self._classes(torch.nn.functional.one_hot))
        observe_masks(torch, ledger, self._masked)
        for name in ("tensor", "as_tensor"):
            ledger.set(torch, name, self._made_of(getattr(torch, name)))
        ClockHooks(self.value_log, ledger).install()
        for name in OF_DEVICES:
            ledger.set(torch.cuda, name, RecordedClock(getattr(torch.cuda, name), self.value_log))
        ledger.set(torch.cuda.Event, "elapsed_time", self._value(torch.cuda.Event.elapsed_time))

    # -- wrappers -------------------------------------------------------------------------------------------

    def _value(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log, here = self.value_log, threading.get_ident
        follows = FROM_A_SEED if really.__name__ == "tolist" else None

        @wraps(really)
        def observed(*args: object, **kwargs: object) -> Any:
            if value_log.paused or here() != value_log.main:
                return really(*args, **kwargs)
            caller = _past_us(sys._getframe(1))  # a lever may have replaced this function
            if caller.f_code is follows:
                value_log.paused = 1  # a mode calls this function again
                try:
                    return really(*args, **kwargs)
                finally:
                    value_log.paused = 0
            at = caller.f_lasti
            if value_log.going:
                return self._answer(really, at, args, kwargs)
            value_log.paused = 1
            try:
                value = really(*args, **kwargs)
            except Exception as error:
                value_log.put(error, at)
                raise
            finally:
                value_log.paused = 0
            value_log.put(value, at, not value_log.began)
            return value

        return observed

    def _answer(
        self, really: Callable[..., Any], at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value_log = self.value_log
        value = value_log.take(at)
        if isinstance(value, Exception):
            raise value
        shares = hasattr(value, "tobytes") and hasattr(value, "dtype")
        if type(value) is not LargeValue and not shares:
            return value
        if any(isinstance(each, ReplayTensor) for each in (*args, *kwargs.values())):
            if shares:
                return value
            value_log.refuse(
                f"in step {value_log.steps + 1} {really.__name__}() returns more values to Python than the journal keeps"
            )
        value_log.paused = 1
        try:
            again = really(*args, **kwargs)  # of a real tensor: an array shares its memory
        finally:
            value_log.paused = 0
        if type(value) is LargeValue:
            if zlib.crc32(encoded(again).encode()) != value.digest:
                value_log.refuse(
                    f"in step {value_log.steps + 1} {really.__name__}() returns other values than in the first run, and too many for the journal"
                )
            return again
        return again if encoded(again) == encoded(value) else value

    def _shape(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log, here = self.value_log, threading.get_ident

        @wraps(really)
        def observed(*args: object, **kwargs: object) -> Any:
            if value_log.paused or here() != value_log.main:
                return really(*args, **kwargs)
            return self._shaped(really, sys._getframe(1).f_lasti, args, kwargs)

        return observed

    def _shaped(
        self, really: Callable[..., Any], at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value_log = self.value_log
        if value_log.going:
            return self._shaped_again(really, at, args, kwargs)
        value_log.paused = 1
        try:
            result = really(*args, **kwargs)
            leaves = pytree.tree_leaves(result)
        except Exception as error:
            value_log.put(error, at)
            raise
        finally:
            value_log.paused = 0
        value_log.put(
            [
                isinstance(result, tuple),
                [
                    [list(each.shape), str(each.dtype).removeprefix("torch."), str(each.device)]
                    for each in leaves
                ],
            ],
            at,
        )
        return result

    def _shaped_again(
        self, really: Callable[..., Any], at: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        found = self.shaped_again(at)
        if self.value_log.began:  # random tensors may differ from the first run
            return found
        with self.value_log.unrecorded:
            again = really(*args, **kwargs)
        if [each.shape for each in pytree.tree_leaves(again)] != [
            each.shape for each in pytree.tree_leaves(found)
        ]:
            self.value_log.refuse(
                f"in step {self.value_log.steps + 1} nonzero() or a mask selects another number of elements than in the first run"
            )
        return again

    def shaped_again(self, at: int) -> Any:
        """Return fake tensors of the shapes recorded at ``at`` in the code."""
        shapes = self.value_log.take(at)
        if isinstance(shapes, Exception):
            raise shapes
        found = [dense(*shape) for shape in shapes[1]]
        return found[0] if not shapes[0] else tuple(found)

    def _made_of(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the construction of a tensor from a list with tensors; reads inside are not recorded."""
        value_log, here = self.value_log, threading.get_ident

        @wraps(really)
        def made(data: object, *args: object, **kwargs: object) -> Any:
            if not isinstance(data, (list, tuple)) or value_log.paused or here() != value_log.main:
                return really(data, *args, **kwargs)
            with value_log.unrecorded:
                return really(data, *args, **kwargs)

        return made

    def _places(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `where`: with only a condition, its result has one row per true element."""

        @wraps(really)
        def where(condition: object, *args: object, **kwargs: object) -> Any:
            if args or kwargs or not self.value_log.observes:
                return really(condition, *args, **kwargs)
            return self._shaped(really, sys._getframe(1).f_lasti, (condition,), {})

        return where

    def _classes(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `one_hot`: without a number of classes, the values decide the shape."""

        @wraps(really)
        def one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
            if num_classes != -1 or not self.value_log.observes:
                return really(tensor, num_classes)
            return self._shaped(really, sys._getframe(1).f_lasti, (tensor, num_classes), {})

        return one_hot

    def _masked(self, really: Callable[[], Any], mask: Tensor, caller: FrameType) -> Any:
        """Index a real tensor with a mask; `flatout.checkpoint.resume.fake_operators` handles computed tensors."""
        value_log = self.value_log
        if value_log.paused or threading.get_ident() != value_log.main:
            return really()
        return self._shaped(really, _past_us(caller).f_lasti, (), {})


def _past_us(frame: FrameType) -> FrameType:
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FLATOUT_DIR):
        frame = frame.f_back
    return frame
