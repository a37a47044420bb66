"""What comes from tensors and clocks to Python, heard at torch's own functions and at those of `time`.

While a program trains, each such value goes to the tape. While it is brought to a save again, it comes from there. A shape that depends on values (`nonzero`, a
mask as an index) comes the same way.
"""

from __future__ import annotations

import builtins
import sys
import threading
import types
import zlib
from collections.abc import Callable, Iterable
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from flatout.capture.frames import HOME, is_users
from flatout.capture.ledger import Ledger
from flatout.capture.masks import hear_masks
from flatout.replay.skeleton import Skeleton, dense, whole
from flatout.replay.tape import Large, Tape, encoded
from flatout.replay.world import users_modules

VALUES = ("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "__complex__", "is_nonzero", "equal", "allclose", "__repr__", "__format__",
          "numpy", "__array__", "__contains__")
SHAPES = ("nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount", "repeat_interleave")
CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "process_time_ns", "thread_time", "strftime",
          "ctime", "localtime", "gmtime", "asctime")
# The order of samples follows from a seed, which is heard, or from a generator of the program's own.
FROM_A_SEED = torch.utils.data.RandomSampler.__iter__.__code__
datetime: Any = sys.modules["datetime"]  # torch has imported it
DATES = {"datetime": ("now", "utcnow", "today"), "date": ("today",)}
OF_DEVICES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "mem_get_info")


class Hearing:
    """``comes_from`` tells a skeleton what it was computed from; ``taken`` is told of what was taken from a tensor that is there, and by whose code."""

    def __init__(self, tape: Tape, ledger: Ledger, comes_from: Callable[[Any, Iterable[Any]], Any], taken: Callable[[Any, FrameType], None]) -> None:
        self.tape, self.ledger, self.comes_from, self.taken = tape, ledger, comes_from, taken
        self._dates: dict[str, Any] = {}
        self._heard: types.ModuleType | None = None

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
        hear_masks(torch, ledger, self._masked, self._taken)
        ledger.set(torch._VF, "_pack_padded_sequence", self._packed(torch._VF._pack_padded_sequence))
        for name in ("tensor", "as_tensor"):
            ledger.set(torch, name, self._made_of(getattr(torch, name)))
        self._install_clocks()
        for name in OF_DEVICES:
            ledger.set(torch.cuda, name, Clock(getattr(torch.cuda, name), self.tape))
        ledger.set(torch.cuda.Event, "elapsed_time", self._value(torch.cuda.Event.elapsed_time))

    def _install_clocks(self) -> None:
        clocks = sys.modules["time"]
        known: list[tuple[Any, Any]] = []
        for name in CLOCKS:
            if hasattr(clocks, name):
                known.append((getattr(clocks, name), clock := Clock(getattr(clocks, name), self.tape)))
                self.ledger.set(clocks, name, clock)
        self.ledger.set(clocks, "sleep", self._sleeps(clocks.sleep))
        known += [(getattr(datetime, name), self._dated(name)) for name in DATES]
        for module in users_modules():  # what the program has taken from there before it imported torch
            for name, value in list(vars(module).items()):
                for really, heard in known:
                    if value is really:
                        self.ledger.set(module, name, heard)
                if value is datetime:
                    self.ledger.set(module, name, self._calendar())
        self.ledger.set(builtins, "__import__", self._imports(builtins.__import__))

    def _sleeps(self, really: Callable) -> Callable:
        tape = self.tape

        @wraps(really)
        def sleep(seconds: float) -> None:
            if not (tape.going and tape.hears and is_users(sys._getframe(1).f_code.co_filename)):  # it has slept already
                really(seconds)

        return sleep

    def _imports(self, really: Callable) -> Callable:
        """The user's own files get a `datetime` whose readings are heard; all others, pickles among them, have the real one."""
        @wraps(really)
        def imports(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:  # torch imports something in each step
            found = really(name, globals, locals, fromlist, level)
            if name != "datetime" or globals is None or not is_users(globals.get("__file__") or ""):
                return found
            return self._calendar()

        return imports

    def _dated(self, name: str) -> Any:
        if name not in self._dates:
            self._dates[name] = _dated(getattr(datetime, name), DATES[name], self.tape)
        return self._dates[name]

    def _calendar(self) -> types.ModuleType:
        """`datetime` as the user's own files see it."""
        if self._heard is None:
            self._heard = types.ModuleType("datetime")
            vars(self._heard).update({**vars(datetime), **{name: self._dated(name) for name in DATES}})
        return self._heard

    # -- wrappers -----------------------------------------------------------------------------------------------------------

    def _value(self, really: Callable) -> Callable:
        tape, here = self.tape, threading.get_ident
        follows = FROM_A_SEED if really.__name__ == "tolist" else None

        @wraps(really)
        def heard(*args: Any, **kwargs: Any) -> Any:
            if tape.deaf or here() != tape.main:
                return really(*args, **kwargs)
            caller = _past_us(sys._getframe(1))  # a lever may have put a function in the place of this one
            if caller.f_code is follows:
                tape.deaf = 1  # a mode calls us again
                try:
                    return really(*args, **kwargs)
                finally:
                    tape.deaf = 0
            at = caller.f_lasti
            if tape.going:
                return self._answer(really, at, args, kwargs)
            tape.deaf = 1
            try:
                value = really(*args, **kwargs)
            except Exception as error:
                tape.put(error, at)
                raise
            finally:
                tape.deaf = 0
            tape.put(value, at, not tape.began)
            return value

        return heard

    def _answer(self, really: Callable, at: int, args: tuple, kwargs: dict) -> Any:
        tape = self.tape
        value = tape.take(at)
        if isinstance(value, Exception):
            raise value
        shares = hasattr(value, "tobytes") and hasattr(value, "dtype")
        if type(value) is not Large and not shares:
            return value
        if any(isinstance(each, Skeleton) for each in (*args, *kwargs.values())):
            if shares:
                return value
            tape.refuse(f"in step {tape.steps + 1} {really.__name__}() hands Python more of a tensor than was kept, and steers the program from there")
        tape.deaf = 1
        try:
            again = really(*args, **kwargs)  # of a tensor that is there: an array shares its memory
        finally:
            tape.deaf = 0
        if type(value) is Large:
            if zlib.crc32(encoded(again)[1]) != value.digest:
                tape.refuse(f"in step {tape.steps + 1} {really.__name__}() gives Python other values than the first time, and too many to have been kept")
            return again
        return again if encoded(again) == encoded(value) else value

    def _shape(self, really: Callable) -> Callable:
        tape, here = self.tape, threading.get_ident

        @wraps(really)
        def heard(*args: Any, **kwargs: Any) -> Any:
            if tape.deaf or here() != tape.main:
                return really(*args, **kwargs)
            return self._shaped(really, sys._getframe(1).f_lasti, args, kwargs)

        return heard

    def _shaped(self, really: Callable, at: int, args: tuple, kwargs: dict) -> Any:
        tape = self.tape
        if tape.going:
            return self._shaped_again(really, at, args, kwargs)
        tape.deaf = 1
        try:
            result = really(*args, **kwargs)
            leaves = pytree.tree_leaves(result)
        except Exception as error:
            tape.put(error, at)
            raise
        finally:
            tape.deaf = 0
        tape.put([isinstance(result, tuple), [[list(each.shape), str(each.dtype).removeprefix("torch."), str(each.device)] for each in leaves]], at)
        return result

    def _shaped_again(self, really: Callable, at: int, args: tuple, kwargs: dict) -> Any:
        found = self.shaped_again(at)
        if self.tape.began:  # tensors may be there that were drawn after other draws than the first time
            return found
        with self.tape.unheard:
            again = really(*args, **kwargs)
        if [each.shape for each in pytree.tree_leaves(again)] != [each.shape for each in pytree.tree_leaves(found)]:
            self.tape.refuse(f"in step {self.tape.steps + 1} it finds another number of places in a tensor than the first time")
        return again

    def shaped_again(self, at: int) -> Any:
        """A skeleton, or several, of the shape that came from ``at`` in the code the first time."""
        shapes = self.tape.take(at)
        if isinstance(shapes, Exception):
            raise shapes
        found = [dense(*shape) for shape in shapes[1]]
        return found[0] if not shapes[0] else tuple(found)

    def _made_of(self, really: Callable) -> Callable:
        """A tensor of a list with tensors in it: what it asks those of steers nothing."""
        tape, here = self.tape, threading.get_ident

        @wraps(really)
        def made(data: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(data, (list, tuple)) or tape.deaf or here() != tape.main:
                return really(data, *args, **kwargs)
            with tape.unheard:
                return really(data, *args, **kwargs)

        return made

    def _packed(self, really: Callable) -> Callable:
        """Sequences of several lengths, packed: the lengths say how many are how long, and that many are computed with."""
        tape, here = self.tape, threading.get_ident

        @wraps(really)
        def pack(padded: Any, lengths: Any, *args: Any) -> Any:
            if tape.deaf or here() != tape.main:
                return really(padded, lengths, *args)
            at = sys._getframe(1).f_lasti
            if tape.going and tape.began:
                sizes = tape.take(at)
                packed = whole((sum(sizes), *padded.shape[2:]), padded.dtype, padded.device)
                return self.comes_from(packed, (padded,)), torch.tensor(sizes, device="cpu")
            with tape.unheard:
                found = really(padded, lengths, *args)
                sizes = found[1].tolist()
            if not tape.going:
                tape.put(sizes, at)
            elif tape.take(at) != sizes:
                tape.refuse(f"in step {tape.steps + 1} it packs sequences of other lengths than the first time")
            return found

        return pack

    def _places(self, really: Callable) -> Callable:
        """With a condition alone it gives as many places as there are."""
        @wraps(really)
        def where(condition: Any, *args: Any, **kwargs: Any) -> Any:
            if args or kwargs or not self.tape.hears:
                return really(condition, *args, **kwargs)
            return self._shaped(really, sys._getframe(1).f_lasti, (condition,), {})

        return where

    def _classes(self, really: Callable) -> Callable:
        """Without a number of classes it has as many as there are."""
        @wraps(really)
        def one_hot(tensor: Any, num_classes: int = -1) -> Any:
            if num_classes != -1 or not self.tape.hears:
                return really(tensor, num_classes)
            return self._shaped(really, sys._getframe(1).f_lasti, (tensor, num_classes), {})

        return one_hot

    def _masked(self, really: Callable[[], Any], mask: Any, caller: FrameType) -> Any:
        """Of tensors that are there; those that a training computes are answered (`flatout.replay.answers`)."""
        tape = self.tape
        if tape.deaf or threading.get_ident() != tape.main:
            return really()
        return self._shaped(really, _past_us(caller).f_lasti, (), {})

    def _taken(self, rows: Any, caller: FrameType) -> None:
        self.taken(rows, _past_us(caller))


def _past_us(frame: FrameType) -> FrameType:
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HOME):
        frame = frame.f_back
    return frame


class Clock:
    """A function of `time`, as the program's own code reads it. No Python function: as an attribute of a class that would become a method."""

    def __init__(self, really: Callable, tape: Tape) -> None:
        self._really, self._tape = really, tape
        self.__name__, self.__doc__ = really.__name__, really.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tape = self._tape
        frame = sys._getframe(1)
        if tape.deaf or not is_users(frame.f_code.co_filename) or threading.get_ident() != tape.main:
            return self._really(*args, **kwargs)
        if tape.going:
            value = tape.take(frame.f_lasti)
            return type(self._really(*args, **kwargs))(value) if type(value) is list else value
        value = self._really(*args, **kwargs)
        tape.put(list(value) if isinstance(value, tuple) else value, frame.f_lasti)
        return value


def _dated(really: Any, readings: tuple[str, ...], tape: Tape) -> Any:
    """A class of `datetime` whose own readings of the clock are heard; to everybody else it is the same class."""

    class Same(type):
        def __instancecheck__(cls, thing: Any) -> bool:
            return isinstance(thing, really)

        def __subclasscheck__(cls, kind: Any) -> bool:
            return issubclass(kind, really)

    def reading(name: str) -> Any:
        def read(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if tape.deaf or not is_users(frame.f_code.co_filename) or threading.get_ident() != tape.main:
                return getattr(really, name)(*args, **kwargs)
            if tape.going:
                told = really.fromisoformat(tape.take(frame.f_lasti))
                zone = kwargs.get("tz", args[0] if args else None)
                return told.astimezone(zone) if zone is not None else told
            found = getattr(really, name)(*args, **kwargs)
            tape.put(found.isoformat(), frame.f_lasti)
            return found

        return staticmethod(read)

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return really(*args, **kwargs) if cls is found else really.__new__(cls, *args, **kwargs)

    names = {"__new__": made, "__module__": "datetime", "__qualname__": really.__name__}
    found = Same(really.__name__, (really,), {**names, **{name: reading(name) for name in readings}})
    return found
