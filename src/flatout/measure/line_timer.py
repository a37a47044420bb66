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

    Covers only this thread. Tracing itself costs time. Nothing is counted while ``paused``.
    ``trace_running`` also traces functions that already run.
    """

    def __init__(self, is_user_file: Callable[[str], bool]) -> None:
        self.is_user_file = is_user_file
        self.ns: Counter[tuple[CodeType, int]] = Counter()
        self._lines: list[tuple[CodeType, int]] = []
        self._now_ns = HostClock.mark
        self._last_ns = 0
        self._traced_frames: list[FrameType] = []
        self._paused = False

    def __enter__(self) -> LineTimer:
        self._previous_trace = sys.gettrace()
        self._last_ns = self._now_ns()
        sys.settrace(self._trace_call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous_trace)
        for frame in self._traced_frames:
            frame.f_trace = None
        self._traced_frames.clear()

    def trace_running(self, frame: FrameType | None) -> None:
        """Trace the user's functions on the stack of ``frame`` from now on."""
        while frame is not None:
            if self.is_user_file(frame.f_code.co_filename):
                self._traced_frames.append(frame)
                frame.f_trace = self._trace_line
            frame = frame.f_back
        self._lines = [(frame.f_code, frame.f_lineno) for frame in reversed(self._traced_frames)]

    @property
    def line(self) -> tuple[CodeType, int] | None:
        """The user's line that is running."""
        return self._lines[-1] if self._lines else None

    @property
    def paused(self) -> bool:
        return self._paused

    @paused.setter
    def paused(self, value: bool) -> None:
        self._charge_elapsed()
        self._paused = value

    def _trace_call(self, frame: FrameType, event: str, arg: object) -> Any:
        if event != "call" or not self.is_user_file(frame.f_code.co_filename):
            return None
        self._charge_elapsed()
        self._lines.append((frame.f_code, frame.f_lineno))
        return self._trace_line

    def _trace_line(self, frame: FrameType, event: str, arg: object) -> Any:
        self._charge_elapsed()
        if event == "line" and self._lines:
            self._lines[-1] = frame.f_code, frame.f_lineno
        elif event == "return" and self._lines:
            self._lines.pop()
        return self._trace_line

    def _charge_elapsed(self) -> None:
        now = self._now_ns()
        if self._lines and not self._paused:
            self.ns[self._lines[-1]] += now - self._last_ns
        self._last_ns = self._now_ns()
