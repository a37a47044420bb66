"""The event FIFO of a launch: a named pipe that ranks (``agent.failure_report``) and our timers write lines to.

The reader gets all events from one descriptor, in the order in which they were written.
"""

import os
import threading
from pathlib import Path

MAX_BYTES = 1 << 16  # what a pipe holds


class EventFifo:
    """The reading end of the event FIFO. Raises OSError if the folder cannot hold a named pipe."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "event_fifo", 0o600)
        # read-write, so that it never reaches end of file
        self.descriptor = os.open(folder / "event_fifo", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._timers: list[threading.Timer] = []

    def lines(self) -> list[list[str]]:
        """The words of each line that has arrived. Call it when the descriptor is readable."""
        return [
            line.split() for line in os.read(self.descriptor, MAX_BYTES).decode(errors="replace").splitlines()
        ]

    def start_timer(self, seconds: float, name: str) -> None:
        """Write ``timer word`` to the FIFO after that time."""
        timer = threading.Timer(seconds, self._write_timer, [name])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _write_timer(self, name: str) -> None:
        try:
            os.write(self.descriptor, f"timer {name}\n".encode())
        except OSError:
            pass  # the FIFO is closed

    def reset(self) -> None:
        """Cancel all timers and discard pending events."""
        for timer in self._timers:
            timer.cancel()
            timer.join()  # the number of a closed descriptor may be reused
        self._timers.clear()
        try:
            os.read(self.descriptor, MAX_BYTES)
        except BlockingIOError:
            pass

    def close(self) -> None:
        self.reset()
        os.close(self.descriptor)
