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

OBSERVED_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)


class Signals:
    """Installs signal handlers.

    ``on_signal(number)`` is called in the main thread, between two instructions of the script. It returns
    whether the script gets the signal now; otherwise ``pass_on`` must be called later.
    """

    def __init__(self, on_signal: Callable[[int], bool]) -> None:
        self.on_signal = on_signal
        self.pid = os.getpid()
        self._handlers: dict[int, Any] = {}  # the script's handler of each; empty: not installed
        self._replaced_handlers: dict[int, Any] = {}  # its handler before an unobserved change
        self._being_handled: set[int] = set()
        self._original_signal, self._original_getsignal = signal.signal, signal.getsignal

    def install(self, ledger: Ledger) -> bool:
        """Install the handlers; return whether this succeeded: only the main thread can do it."""
        if threading.current_thread() is not threading.main_thread():
            return False
        self._original_signal, self._original_getsignal = signal.signal, signal.getsignal
        self._handlers = {number: self._original_getsignal(number) for number in OBSERVED_SIGNALS}
        ledger.set(signal, "signal", self._wrap_signal(self._original_signal))
        ledger.set(signal, "getsignal", self._wrap_getsignal(self._original_getsignal))
        for number in OBSERVED_SIGNALS:
            self._set_observer(number)
        ledger.on_restore("signal handlers", self.uninstall)
        os.register_at_fork(after_in_child=self.uninstall)
        return True

    def uninstall(self) -> None:
        """Restore the script's handlers.

        Outside the main thread this is impossible, and signals are passed on as before.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            if self._original_getsignal(number) == self._observe:
                self._original_signal(number, handler)

    def recheck(self) -> None:
        """Check the handlers again: a script that imported ``signal.signal`` early sets them unobserved."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in list(self._handlers.items()):
                current = self._original_getsignal(number)
                if current != self._observe and current is not handler:
                    self._replaced_handlers[number], self._handlers[number] = handler, current
                    self._set_observer(number)

    def pass_on(self, number: int, frame: FrameType | None = None) -> None:
        """Run the script's reaction to this signal; it may not return, and may raise."""
        handler = self._handler(number)
        if callable(handler):
            self._being_handled.add(number)
            try:
                handler(number, frame)
            finally:
                self._being_handled.discard(number)
        elif handler == signal.SIG_DFL:
            self._original_signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _handler(self, number: int) -> Any:
        return (self._replaced_handlers if number in self._being_handled else self._handlers).get(
            number, signal.SIG_DFL
        )

    def _set_observer(self, number: int) -> None:
        handler = self._handlers[number]
        if callable(handler) or handler == signal.SIG_DFL:  # neither ignored signals nor handlers of C code
            self._original_signal(number, self._observe)

    def _observe(self, number: int, frame: FrameType | None) -> None:
        called_by_script = sys._getframe(1) is not frame  # the script's handler calls the one it replaced
        if number not in self._being_handled and os.getpid() == self.pid and not self.on_signal(number):
            return
        if called_by_script and not callable(self._handler(number)):
            return
        self.pass_on(number, frame)

    def _wrap_signal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def hooked_signal(signalnum: object, handler: object) -> Any:
            if signalnum not in self._handlers or not (callable(handler) or handler == signal.SIG_DFL):
                previous = original(signalnum, handler)
                if signalnum not in self._handlers:
                    return previous
            else:
                original(signalnum, self._observe)
            previous, self._handlers[signalnum] = self._handlers[signalnum], handler
            return previous

        return hooked_signal

    def _wrap_getsignal(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def hooked_getsignal(signalnum: object) -> Any:
            handler = original(signalnum)
            return (
                self._handlers[signalnum]
                if handler == self._observe and signalnum in self._handlers
                else handler
            )

        return hooked_getsignal
