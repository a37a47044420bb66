"""Clocks and calendars whose values are recorded and replayed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from flatout.agent.frames import is_users
from flatout.checkpoint.resume.value_log import ValueLog


class RecordedClock:
    """A function of `time` with recorded results for the script's own code.

    It is no Python function, which would become a method as a class attribute.
    """

    def __init__(self, really: Callable[..., Any], value_log: ValueLog) -> None:
        self._really, self._value_log = really, value_log
        self.__name__, self.__doc__ = really.__name__, really.__doc__

    def __call__(self, *args: object, **kwargs: object) -> Any:
        value_log = self._value_log
        frame = sys._getframe(1)
        if (
            value_log.deaf
            or not is_users(frame.f_code.co_filename)
            or threading.get_ident() != value_log.main
        ):
            return self._really(*args, **kwargs)
        if value_log.going:
            value = value_log.take(frame.f_lasti)
            return type(self._really(*args, **kwargs))(value) if type(value) is list else value
        value = self._really(*args, **kwargs)
        value_log.put(list(value) if isinstance(value, tuple) else value, frame.f_lasti)
        return value


def dated(really: Any, readings: tuple[str, ...], value_log: ValueLog) -> Any:
    """Return a class of `datetime` that records its clock readings and passes type checks."""

    class Same(type):
        def __instancecheck__(cls, thing: object) -> bool:
            return isinstance(thing, really)

        def __subclasscheck__(cls, kind: type) -> bool:
            return issubclass(kind, really)

    def reading(name: str) -> Any:
        def read(*args: object, **kwargs: object) -> Any:
            frame = sys._getframe(1)
            if (
                value_log.deaf
                or not is_users(frame.f_code.co_filename)
                or threading.get_ident() != value_log.main
            ):
                return getattr(really, name)(*args, **kwargs)
            if value_log.going:
                metadata = really.fromisoformat(value_log.take(frame.f_lasti))
                zone = kwargs.get("tz", args[0] if args else None)
                return metadata.astimezone(zone) if zone is not None else metadata
            found = getattr(really, name)(*args, **kwargs)
            value_log.put(found.isoformat(), frame.f_lasti)
            return found

        return staticmethod(read)

    def made(cls: type, *args: object, **kwargs: object) -> Any:
        return really(*args, **kwargs) if cls is found else really.__new__(cls, *args, **kwargs)

    names = {"__new__": made, "__module__": "datetime", "__qualname__": really.__name__}
    found = Same(really.__name__, (really,), {**names, **{name: reading(name) for name in readings}})
    return found
