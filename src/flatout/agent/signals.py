"""Observes signals that end a script or announce its end, before the script handles them.

Flatout's handler runs before the script's own. ``signal.getsignal`` and ``signal.signal`` answer the script
as if flatout's handler did not exist, and ignored signals stay ignored. Forked children get the script's
handlers back.
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

from flatout.agent.ledger import Ledger

OBSERVED = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)


class Signals:
    """Installs signal handlers.

    ``before(number)`` is called in the main thread, between two instructions of the script. It returns
    whether the script gets the signal now; otherwise ``pass_on`` must be called later.
    """

    def __init__(self, before: Callable[[int], bool]) -> None:
        self.before = before
        self.pid = os.getpid()
        self._theirs: dict[int, Any] = {}  # the script's handler of each; empty: not installed
        self._beneath: dict[int, Any] = {}  # its handler before an unobserved change
        self._passing: set[int] = set()
        self._set, self._get = signal.signal, signal.getsignal

    def install(self, ledger: Ledger) -> bool:
        """Install the handlers; return whether this succeeded: only the main thread can do it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._set, self._get = signal.signal, signal.getsignal
        self._theirs = {number: self._get(number) for number in OBSERVED}
        ledger.set(signal, "signal", self._wrap_set(self._set))
        ledger.set(signal, "getsignal", self._wrap_get(self._get))
        for number in OBSERVED:
            self._set_observer(number)
        ledger.call("signal handlers", self.leave)
        os.register_at_fork(after_in_child=self.leave)
        return True

    def leave(self) -> None:
        """Restore the script's handlers.

        Outside the main thread this is impossible, and signals are passed on as before.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        theirs, self._theirs = self._theirs, {}
        for number, handler in theirs.items():
            if self._get(number) == self._observe:
                self._set(number, handler)

    def look_again(self) -> None:
        """Check the handlers again: a script that imported ``signal.signal`` early sets them unobserved."""
        if threading.current_thread() is threading.main_thread():
            for number, known in list(self._theirs.items()):
                now = self._get(number)
                if now != self._observe and now is not known:
                    self._beneath[number], self._theirs[number] = known, now
                    self._set_observer(number)

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """Run the script's reaction to this signal; it may not return, and may raise."""
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

    def _set_observer(self, number: int) -> None:
        handler = self._theirs[number]
        if callable(handler) or handler == signal.SIG_DFL:  # neither ignored signals nor handlers of C code
            self._set(number, self._observe)

    def _observe(self, number: int, frame: FrameType | None) -> None:
        by_the_program = sys._getframe(1) is not frame  # the script's handler calls the one it replaced
        if number not in self._passing and os.getpid() == self.pid and not self.before(number):
            return
        if by_the_program and not callable(self._handler(number)):
            return
        self.pass_on(number, frame)

    def _wrap_set(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def hooked_signal(signalnum: object, handler: object) -> Any:
            if signalnum not in self._theirs or not (callable(handler) or handler == signal.SIG_DFL):
                before = really(signalnum, handler)
                if signalnum not in self._theirs:
                    return before
            else:
                really(signalnum, self._observe)
            before, self._theirs[signalnum] = self._theirs[signalnum], handler
            return before

        return hooked_signal

    def _wrap_get(self, really: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(really)
        def hooked_getsignal(signalnum: object) -> Any:
            found = really(signalnum)
            return self._theirs[signalnum] if found == self._observe and signalnum in self._theirs else found

        return hooked_getsignal
