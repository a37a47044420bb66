"""Hooks the functions of torch and `time` that return values to Python.

While recording, each such value is added to the value log. During a replay it is read from there. Shapes that
depend on values (`nonzero`, indexing with a mask) are handled the same way.
"""

from __future__ import annotations

import builtins
import sys
import threading
import types
import zlib
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from flatout.agent.frames import FLATOUT_DIR, is_user_file, user_modules
from flatout.agent.ledger import Ledger
from flatout.agent.synchronisations import observe_masks
from flatout.checkpoint.resume.gradient_sources import ReplayTensor, dense
from flatout.checkpoint.resume.value_log import LargeValue, ValueLog, encode

if TYPE_CHECKING:
    from torch import Tensor


CLOCKS = (
    "time",
    "time_ns",
    "perf_counter",
    "perf_counter_ns",
    "monotonic",
    "monotonic_ns",
    "process_time",
    "process_time_ns",
    "thread_time",
    "strftime",
    "ctime",
    "localtime",
    "gmtime",
    "asctime",
)
time, datetime = sys.modules["time"], sys.modules["datetime"]  # already imported by torch
DATES = {"datetime": ("now", "utcnow", "today"), "date": ("today",)}


class RecordedClock:
    """A function whose results are recorded for the script's own code.

    It is no Python function, which would become a method as a class attribute."""

    def __init__(self, original: Callable[..., Any], value_log: ValueLog) -> None:
        self.original, self.value_log = original, value_log
        self.__name__, self.__doc__ = original.__name__, original.__doc__

    def __call__(self, *args: object, **kwargs: object) -> Any:
        value_log, frame = self.value_log, sys._getframe(1)
        if not value_log.observes or not is_user_file(frame.f_code.co_filename):
            return self.original(*args, **kwargs)
        if value_log.replaying:
            return self.decode(value_log.take(frame.f_lasti), *args, **kwargs)
        value = self.original(*args, **kwargs)
        value_log.put(self.encode(value), frame.f_lasti)
        return value

    def encode(self, value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    def decode(self, value: Any, *args: object, **kwargs: object) -> Any:
        return time.struct_time(value) if type(value) is list and len(value) == 9 else value


class RecordedDate(RecordedClock):
    """A method of `datetime` or `date` that reads a clock."""

    def encode(self, value: Any) -> Any:
        return value.isoformat()

    def decode(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        date = self.original.__self__.fromisoformat(value)  # type: ignore[attr-defined]
        zone = kwargs.get("tz", args[0] if args else None)
        return date.astimezone(zone) if zone is not None else date


class ClockHooks:
    """Records or replays what `time` and `datetime` return to the script."""

    def __init__(self, value_log: ValueLog, ledger: Ledger) -> None:
        self.ledger = ledger
        self._recorded: dict[Any, Any] = {
            getattr(time, name): RecordedClock(getattr(time, name), value_log) for name in CLOCKS
        }
        dates = {name: recording_class(getattr(datetime, name), DATES[name], value_log) for name in DATES}
        # `datetime` as the user's own files see it
        self._calendar = types.ModuleType("datetime")
        vars(self._calendar).update({**vars(datetime), **dates})
        self._recorded |= {getattr(datetime, name): kind for name, kind in dates.items()}
        self._recorded[datetime] = self._calendar

    def install(self) -> None:
        for name in CLOCKS:
            self.ledger.set(time, name, self._recorded[getattr(time, name)])
        for module in user_modules():  # names the script imported before torch
            for name, value in list(vars(module).items()):
                if (
                    isinstance(value, (types.BuiltinFunctionType, type, types.ModuleType))
                    and value in self._recorded
                ):
                    self.ledger.set(module, name, self._recorded[value])
        self.ledger.set(builtins, "__import__", self._wrap_import(builtins.__import__))

    def _wrap_import(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        # called often: torch imports in each step
        def imports(
            name: str, globals: Any = None, locals: object = None, fromlist: object = (), level: int = 0
        ) -> Any:
            module = original(name, globals, locals, fromlist, level)
            if name != "datetime" or globals is None or not is_user_file(globals.get("__file__") or ""):
                return module
            return self._calendar

        return imports


def recording_class(original: Any, methods: tuple[str, ...], value_log: ValueLog) -> Any:
    """Return a class of `datetime` that records its clock readings and passes type checks."""

    class RecordingMeta(type):
        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, original)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, original)

    def new(cls: type, *args: object, **kwargs: object) -> Any:
        return original(*args, **kwargs) if cls is recording else original.__new__(cls, *args, **kwargs)

    names = {"__new__": new, "__module__": "datetime", "__qualname__": original.__name__}
    readers = {name: RecordedDate(getattr(original, name), value_log) for name in methods}
    recording = RecordingMeta(original.__name__, (original,), {**names, **readers})
    return recording


Function = Callable[..., Any]
VALUE_METHODS = (
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
SHAPE_FUNCTIONS = (
    "nonzero",
    "argwhere",
    "unique",
    "unique_consecutive",
    "masked_select",
    "bincount",
    "repeat_interleave",
)
# The sample order follows from a seed, which is recorded, or from a generator of the script.
SEEDED_SAMPLER = torch.utils.data.RandomSampler.__iter__.__code__
DEVICE_MEMORY = (
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
        for name in VALUE_METHODS:
            ledger.set(torch.Tensor, name, self._wrap_value(getattr(torch.Tensor, name)))
        for name in ("equal", "allclose", "is_nonzero"):
            ledger.set(torch, name, self._wrap_value(getattr(torch, name)))
        for name in SHAPE_FUNCTIONS:
            for owner in (torch.Tensor, torch):
                if hasattr(owner, name):
                    ledger.set(owner, name, self._wrap_shape(getattr(owner, name)))
        ledger.set(torch, "where", self._wrap_where(torch.where))
        ledger.set(torch.nn.functional, "one_hot", self._wrap_one_hot(torch.nn.functional.one_hot))
        observe_masks(torch, ledger, self._on_mask)
        for name in ("tensor", "as_tensor"):
            ledger.set(torch, name, self._wrap_constructor(getattr(torch, name)))
        ClockHooks(self.value_log, ledger).install()
        for name in DEVICE_MEMORY:
            ledger.set(torch.cuda, name, RecordedClock(getattr(torch.cuda, name), self.value_log))
        ledger.set(torch.cuda.Event, "elapsed_time", self._wrap_value(torch.cuda.Event.elapsed_time))

    # -- wrappers

    def _wrap_value(self, original: Function) -> Function:
        value_log, thread_id = self.value_log, threading.get_ident
        seeded = SEEDED_SAMPLER if original.__name__ == "tolist" else None

        @wraps(original)
        def observed(*args: object, **kwargs: object) -> Any:
            if value_log.paused or thread_id() != value_log.main:
                return original(*args, **kwargs)
            caller = _users_frame(sys._getframe(1))  # a lever may have replaced this function
            if caller.f_code is seeded:
                value_log.paused = 1  # a mode calls this function again
                try:
                    return original(*args, **kwargs)
                finally:
                    value_log.paused = 0
            place_id = caller.f_lasti
            if value_log.replaying:
                return self._answer(original, place_id, args, kwargs)
            value_log.paused = 1
            try:
                value = original(*args, **kwargs)
            except Exception as error:
                value_log.put(error, place_id)
                raise
            finally:
                value_log.paused = 0
            value_log.put(value, place_id, not value_log.training_began)
            return value

        return observed

    def _answer(
        self, original: Function, place_id: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value_log = self.value_log
        value = value_log.take(place_id)
        if isinstance(value, Exception):
            raise value
        is_array = hasattr(value, "tobytes") and hasattr(value, "dtype")
        if type(value) is not LargeValue and not is_array:
            return value
        if any(isinstance(argument, ReplayTensor) for argument in (*args, *kwargs.values())):
            if is_array:
                return value
            value_log.refuse(
                f"in step {value_log.steps + 1} {original.__name__}() returns more values to Python than the journal keeps"
            )
        with value_log.unrecorded:
            recomputed = original(*args, **kwargs)  # of a real tensor: an array shares its memory
        if type(value) is LargeValue:
            if zlib.crc32(encode(recomputed).encode()) != value.digest:
                value_log.refuse(
                    f"in step {value_log.steps + 1} {original.__name__}() returns other values than in the first run, and too many for the journal"
                )
            return recomputed
        return recomputed if encode(recomputed) == encode(value) else value

    def _wrap_shape(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def observed(*args: object, **kwargs: object) -> Any:
            if not value_log.observes:
                return original(*args, **kwargs)
            return self._record_shapes(original, sys._getframe(1).f_lasti, args, kwargs)

        return observed

    def _record_shapes(
        self, original: Function, place_id: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        value_log = self.value_log
        if value_log.replaying:
            return self._replay_shapes(original, place_id, args, kwargs)
        try:
            with value_log.unrecorded:
                result = original(*args, **kwargs)
                leaves = pytree.tree_leaves(result)
        except Exception as error:
            value_log.put(error, place_id)
            raise
        shapes = [
            [list(leaf.shape), str(leaf.dtype).removeprefix("torch."), str(leaf.device)] for leaf in leaves
        ]
        value_log.put([isinstance(result, tuple), shapes], place_id)
        return result

    def _replay_shapes(
        self, original: Function, place_id: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        recorded = self.make_recorded_result(place_id)
        if self.value_log.training_began:  # random tensors may differ from the first run
            return recorded
        with self.value_log.unrecorded:
            recomputed = original(*args, **kwargs)
        shapes = ([leaf.shape for leaf in pytree.tree_leaves(result)] for result in (recomputed, recorded))
        if next(shapes) != next(shapes):
            self.value_log.refuse(
                f"in step {self.value_log.steps + 1} nonzero() or a mask selects another number of elements than in the first run"
            )
        return recomputed

    def make_recorded_result(self, place_id: int) -> Any:
        """Return fake tensors of the shapes recorded at this place in the code."""
        shapes = self.value_log.take(place_id)
        if isinstance(shapes, Exception):
            raise shapes
        tensors = [dense(*shape) for shape in shapes[1]]
        return tensors[0] if not shapes[0] else tuple(tensors)

    def _wrap_constructor(self, original: Function) -> Function:
        value_log = self.value_log

        @wraps(original)
        def constructor(data: object, *args: object, **kwargs: object) -> Any:
            if not isinstance(data, (list, tuple)) or not value_log.observes:
                return original(data, *args, **kwargs)
            with value_log.unrecorded:
                return original(data, *args, **kwargs)

        return constructor

    def _wrap_where(self, original: Function) -> Function:
        @wraps(original)
        def where(condition: object, *args: object, **kwargs: object) -> Any:
            if args or kwargs or not self.value_log.observes:
                return original(condition, *args, **kwargs)
            return self._record_shapes(original, sys._getframe(1).f_lasti, (condition,), {})

        return where

    def _wrap_one_hot(self, original: Function) -> Function:
        """Wrap `one_hot`: without a number of classes, the values decide the shape."""

        @wraps(original)
        def one_hot(tensor: Tensor, num_classes: int = -1) -> Any:
            if num_classes != -1 or not self.value_log.observes:
                return original(tensor, num_classes)
            return self._record_shapes(original, sys._getframe(1).f_lasti, (tensor, num_classes), {})

        return one_hot

    def _on_mask(self, original: Callable[[], Any], mask: Tensor, caller: FrameType) -> Any:
        value_log = self.value_log
        if not value_log.observes:
            return original()
        return self._record_shapes(original, _users_frame(caller).f_lasti, (), {})


def _users_frame(frame: FrameType) -> FrameType:
    while frame.f_back is not None and frame.f_code.co_filename.startswith(FLATOUT_DIR):
        frame = frame.f_back
    return frame
