"""Signals that end a program or announce its end, heard before what the program does with them.

Our handler stands in front of the program's own. The program is answered by ``signal.getsignal`` and ``signal.signal`` as if ours were not there, and what it
ignores stays ignored. Children that are forked have the program's handlers again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

from flatout.capture.ledger import Ledger

HEARD = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name))


class Signals:
    """``before(number)`` is called in the main thread, between two instructions of the program. It answers whether the program gets the signal now; else
    somebody calls ``pass_on`` later."""

    def __init__(self, before: Callable[[int], bool]) -> None:
        self.before = before
        self.pid = os.getpid()
        self._theirs: dict[int, Any] = {}  # what the program does with each; empty: nothing is heard
        self._beneath: dict[int, Any] = {}  # what it did before it changed that without our knowledge
        self._passing: set[int] = set()
        self._set, self._get = signal.signal, signal.getsignal

    def install(self, ledger: Ledger) -> bool:
        """Whether signals are heard from now on: only the main thread can arrange for it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._set, self._get = signal.signal, signal.getsignal
        self._theirs = {number: self._get(number) for number in HEARD}
        ledger.set(signal, "signal", self._wrap_set(self._set))
        ledger.set(signal, "getsignal", self._wrap_get(self._get))
        for number in HEARD:
            self._stand_before(number)
        ledger.call("signal handlers", self.leave)
        os.register_at_fork(after_in_child=self.leave)
        return True

    def leave(self) -> None:
        """The program's own handlers again, as it has set them. Elsewhere than in the main thread nothing can be set, and ours passes on as before."""
        if threading.current_thread() is not threading.main_thread():
            return
        theirs, self._theirs = self._theirs, {}
        for number, handler in theirs.items():
            if self._get(number) == self._hear:
                self._set(number, handler)

    def look_again(self) -> None:
        """A program that has imported ``signal.signal`` by name before torch changes handlers unheard."""
        if threading.current_thread() is threading.main_thread():
            for number, known in list(self._theirs.items()):
                now = self._get(number)
                if now != self._hear and now is not known:
                    self._beneath[number], self._theirs[number] = known, now
                    self._stand_before(number)

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """What the program does with this signal; may not return, and may raise."""
        handler = self._handler(number)
        if callable(handler):
            self._passing.add(number)
            try:
                handler(number, frame)
            finally:
                self._passing.discard(number)
        elif handler == signal.SIG_DFL:
            self._set(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _handler(self, number: int) -> Any:
        return (self._beneath if number in self._passing else self._theirs).get(number, signal.SIG_DFL)

    def _stand_before(self, number: int) -> None:
        handler = self._theirs[number]
        if callable(handler) or handler == signal.SIG_DFL:  # not what is ignored, nor what C code has set
            self._set(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        by_the_program = sys._getframe(1) is not frame  # a handler of the program's calls what it has found beneath
        if number not in self._passing and os.getpid() == self.pid and not self.before(number):
            return
        if by_the_program and not callable(self._handler(number)):
            return
        self.pass_on(number, frame)

    def _wrap_set(self, really: Callable) -> Callable:
        @wraps(really)
        def signal_heard(signalnum: Any, handler: Any) -> Any:
            if signalnum not in self._theirs or not (callable(handler) or handler == signal.SIG_DFL):
                before = really(signalnum, handler)
                if signalnum not in self._theirs:
                    return before
            else:
                really(signalnum, self._hear)
            before, self._theirs[signalnum] = self._theirs[signalnum], handler
            return before

        return signal_heard

    def _wrap_get(self, really: Callable) -> Callable:
        @wraps(really)
        def getsignal_heard(signalnum: Any) -> Any:
            found = really(signalnum)
            return self._theirs[signalnum] if found == self._hear and signalnum in self._theirs else found

        return getsignal_heard
