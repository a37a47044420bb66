"""The bell of a launch: a named pipe that ranks write lines to when something happens to them (``capture.firstwords``), and our own timers too.

Whoever listens gets everything through one descriptor, in the order in which it was written.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

MOST_BYTES = 1 << 16  # what a pipe holds


class Bell:
    """Raises OSError where the folder takes no pipe."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "bell", 0o600)
        self.descriptor = os.open(folder / "bell", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)  # also for writing: then it never comes to its end
        self._timers: list[threading.Timer] = []

    def lines(self) -> list[list[str]]:
        """The words of each line that has come. Called when there are some."""
        return [line.split() for line in os.read(self.descriptor, MOST_BYTES).decode(errors="replace").splitlines()]

    def after(self, seconds: float, word: str) -> None:
        """Ring ``timer word`` when that time has passed."""
        timer = threading.Timer(seconds, self._ring, [word])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _ring(self, word: str) -> None:
        try:
            os.write(self.descriptor, f"timer {word}\n".encode())
        except OSError:
            pass  # it is over

    def hush(self) -> None:
        """No timer rings any more, and what has rung is forgotten."""
        for timer in self._timers:
            timer.cancel()
            timer.join()  # the number of a closed descriptor may be somebody else's soon
        self._timers.clear()
        try:
            os.read(self.descriptor, MOST_BYTES)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self.hush()
        os.close(self.descriptor)
