"""Signals that ask a training to end: it finishes its step and saves first. Handlers stand while a Loop is iterated over, in the main thread, and no longer."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

ASKING = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")


class Signals:
    """``seen``: the number of the signal that came first, 0 where none did. The second one ends the program at once."""

    def __init__(self) -> None:
        self.seen = 0
        self._before: dict[int, Any] = {}

    def listen(self) -> None:
        """What is ignored stays ignored (nohup), and what some C library handles stays its own."""
        if threading.current_thread() is not threading.main_thread() or self._before:
            return
        for name in ASKING:
            number = getattr(signal, name, None)
            before = signal.getsignal(number) if number is not None else None
            if number is not None and before not in (None, signal.SIG_IGN):
                self._before[number] = before
                signal.signal(number, self._hear)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.seen = self.seen or number
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)

    def leave(self) -> None:
        """The handlers that were there before are there again."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before = {}

    def end(self) -> None:
        """What would have happened at the signal happens now: the program's own handler is called, and the program ends with 128 and the signal's number.

        Raises SystemExit, or what that handler raises: KeyboardInterrupt, where the program has none of its own for SIGINT.
        """
        before = self._before.get(self.seen)
        number = self.seen
        self.leave()
        if callable(before):
            before(number, None)
        raise SystemExit(128 + number)
