"""Records the clocks and calendars that a script reads."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

from flatout.agent.frames import is_user_file, user_modules
from flatout.agent.ledger import Ledger
from flatout.checkpoint.resume.value_log import ValueLog

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

    It is no Python function, which would become a method as a class attribute.
    """

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
