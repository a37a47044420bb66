"""Measure the time of a call by lines of the user's code.

A line includes the time of library code that it calls.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

from flatout.measure.clock import HostClock


class LineTimer:
    """``with LineTimer(is_user_file) as timer:``, then ``timer.ns`` maps (code, line) to nanoseconds.

    Covers only this thread. Tracing itself costs time. Nothing is counted while ``paused``. ``adopt`` also
    traces functions that already run.
    """

    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        self.is_user_file = is_user_file
        self.ns: Counter[tuple[CodeType, int]] = Counter()
        self._open: list[tuple[CodeType, int]] = []
        self._mark = HostClock.mark
        self._last = 0
        self._adopted: list[FrameType] = []
        self._paused = False

    def __enter__(self) -> LineTimer:
        self._before = sys.gettrace()
        self._last = self._mark()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        for frame in self._adopted:
            frame.f_trace = None
        self._adopted.clear()

    def adopt(self, frame: FrameType | None) -> None:
        """Trace the user's functions on the stack of ``frame`` from now on."""
        while frame is not None:
            if self.is_user_file(frame.f_code.co_filename):
                self._adopted.append(frame)
                frame.f_trace = self._observed
            frame = frame.f_back
        self._open = [(frame.f_code, frame.f_lineno) for frame in reversed(self._adopted)]

    @property
    def line(self) -> tuple[CodeType, int] | None:
        """Return the user's line that is running."""
        return self._open[-1] if self._open else None

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._pass()
        self._paused = value

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        if event != "call" or not self.is_user_file(frame.f_code.co_filename):
            return None
        self._pass()
        self._open.append((frame.f_code, frame.f_lineno))
        return self._observed

    def _observed(self, frame: FrameType, event: str, arg: object) -> Any:
        self._pass()
        if event == "line" and self._open:
            self._open[-1] = frame.f_code, frame.f_lineno
        elif event == "return" and self._open:
            self._open.pop()
        return self._observed

    def _pass(self) -> None:
        now = self._mark()
        if self._open and not self._paused:
            self.ns[self._open[-1]] += now - self._last
        self._last = self._mark()
