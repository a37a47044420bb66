"""Signals that ask a training to end: it finishes its step and writes a checkpoint first.

The handlers are installed only while a Loop is iterated over, in the main thread.
"""

import signal
import threading
from types import FrameType
from typing import Any

STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class StopSignals:
    """``received``: the number of the first signal, 0 if there was none.

    The second signal ends the program at once."""

    def __init__(self) -> None:
        self.received = 0
        self._previous: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers. Ignored signals stay ignored (nohup), and handlers of C libraries stay."""
        if threading.current_thread() is not threading.main_thread() or self._previous:
            return
        for name in STOP_SIGNALS:
            number = getattr(signal, name, None)
            previous = signal.getsignal(number) if number is not None else None
            if number is not None and previous not in (None, signal.SIG_IGN):
                self._previous[number] = previous
                signal.signal(number, self._observe)

    def _observe(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        for other in self._previous:
            signal.signal(other, signal.SIG_DFL)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        self._previous = {}

    def end(self) -> None:
        """Do what the signal would have done.

        This calls the program's own handler, then exits with 128 plus the signal's number. Raises SystemExit,
        or the exception of that handler: KeyboardInterrupt if the program has no handler for SIGINT."""
        previous = self._previous.get(self.received)
        number = self.received
        self.restore()
        if callable(previous):
            previous(number, None)
        raise SystemExit(128 + number)
