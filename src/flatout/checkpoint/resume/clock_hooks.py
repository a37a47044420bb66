"""Records the clocks and calendars that a script reads."""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Callable
from functools import wraps
from typing import Any

from flatout.agent.frames import is_users
from flatout.agent.ledger import Ledger
from flatout.checkpoint.resume.recorded_clock import RecordedClock, dated
from flatout.checkpoint.resume.users_objects import users_modules
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
datetime = sys.modules["datetime"]  # already imported by torch
DATES = {"datetime": ("now", "utcnow", "today"), "date": ("today",)}


class ClockHooks:
    """Records or replays what `time` and `datetime` return to the script."""

    def __init__(self, value_log: ValueLog, ledger: Ledger) -> None:
        self.value_log, self.ledger = value_log, ledger
        self._dates: dict[str, Any] = {}
        self._observed: types.ModuleType | None = None

    def install(self) -> None:
        clocks = sys.modules["time"]
        known: list[tuple[Any, Any]] = []
        for name in CLOCKS:
            if hasattr(clocks, name):
                known.append(
                    (getattr(clocks, name), clock := RecordedClock(getattr(clocks, name), self.value_log))
                )
                self.ledger.set(clocks, name, clock)
        self.ledger.set(clocks, "sleep", self._sleeps(clocks.sleep))
        known += [(getattr(datetime, name), self._dated(name)) for name in DATES]
        for module in users_modules():  # names the script imported before torch
            for name, value in list(vars(module).items()):
                for really, observed in known:
                    if value is really:
                        self.ledger.set(module, name, observed)
                if value is datetime:
                    self.ledger.set(module, name, self._calendar())
        self.ledger.set(builtins, "__import__", self._imports(builtins.__import__))

    def _sleeps(self, really: Callable[..., Any]) -> Callable[..., Any]:
        value_log = self.value_log

        @wraps(really)
        def sleep(seconds: float) -> None:
            # no need to sleep again
            if not (value_log.going and value_log.observes and is_users(sys._getframe(1).f_code.co_filename)):
                really(seconds)

        return sleep

    def _imports(self, really: Callable[..., Any]) -> Callable[..., Any]:
        """Give the user's files a `datetime` with recorded clock readings, all other code the real one."""

        @wraps(really)
        # called often: torch imports in each step
        def imports(
            name: str, globals: Any = None, locals: object = None, fromlist: object = (), level: int = 0
        ) -> Any:
            found = really(name, globals, locals, fromlist, level)
            if name != "datetime" or globals is None or not is_users(globals.get("__file__") or ""):
                return found
            return self._calendar()

        return imports

    def _dated(self, name: str) -> Any:
        if name not in self._dates:
            self._dates[name] = dated(getattr(datetime, name), DATES[name], self.value_log)
        return self._dates[name]

    def _calendar(self) -> types.ModuleType:
        """Return `datetime` as the user's own files see it."""
        if self._observed is None:
            self._observed = types.ModuleType("datetime")
            vars(self._observed).update({**vars(datetime), **{name: self._dated(name) for name in DATES}})
        return self._observed
