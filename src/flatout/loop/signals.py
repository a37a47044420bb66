"""Signals that ask a training to end: it finishes its step and writes a checkpoint first.

The handlers are installed only while a Loop is iterated over, in the main thread.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

ASKING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class StopSignals:
    """``seen``: the number of the first signal, 0 if there was none.

    The second signal ends the program at once.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """Install the handlers. Ignored signals stay ignored (nohup), and handlers of C libraries stay."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        for name in ASKING:
            number = getattr(signal, name, None)
            before = signal.getsignal(number) if number is not None else None
            if number is not None and before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._observe)

    def _observe(self, number: int, frame: FrameType | None) -> None:
        self.seen = self.seen or number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)

    def leave(self) -> None:
        """Restore the previous handlers."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def end(self) -> None:
        """Do what the signal would have done.

        This calls the program's own handler, then exits with 128 plus the signal's number. Raises SystemExit,
        or the exception of that handler: KeyboardInterrupt if the program has no handler for SIGINT.
        """
        before = self._before.get(self.seen)
        number = self.seen
        self.leave()
        if callable(before):
            before(number, None)
        raise SystemExit(128 + number)
