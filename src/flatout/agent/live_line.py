"""`flatout run --watch`: a live status line on standard error, without changes to the program's output.

In a terminal the line occupies the last row, and the rows above scroll (DECSTBM, as apt's progress bar does).
If standard error is a file, a line is written every 30 s. The figures are those of `flatout.agent.live_figures`.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TextIO

from flatout.agent.bootstrap import say
from flatout.agent.live_figures import LiveFigures, Moment, Repeated
from flatout.render.formatting import figure, size

EVERY_S = {True: 1.0, False: 30.0}  # in a terminal, and in a file


class LiveLine:
    """The live line: starts with the first counted steps, and ends when the process exits."""

    def __init__(self, stream: TextIO, figures: LiveFigures, known: Mapping[str, float]) -> None:
        self.figures, self.known = figures, known
        self.row = StatusRow(stream) if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" else None
        self.last = figures.now()
        self.pid = os.getpid()
        self.drawing = Repeated(EVERY_S[self.row is not None], self._draw, "flatout-watch")
        atexit.register(self.close)

    def _draw(self) -> None:
        now = self.figures.now()
        text, self.last = self.sentence(self.last, now), now
        if self.row is not None:
            self.row.draw(text)
        else:
            say(text)

    def sentence(self, before: Moment, now: Moment) -> str:
        """Return the figures between two moments, such as
        ``1,234 samples/s | 82.3 steps/s | waits for data 12 % | 1.8 of 2 cores | 1.2 GiB``."""
        seen = self.figures.between(before, now)
        machine = [f"{seen['cores_used']:.1f} of {self.figures.cores} cores", size(seen["memory_bytes"] or 0)]
        if seen["gpu_busy"] is not None:
            machine.append(f"GPU {seen['gpu_busy']:.0%} busy")
        if not seen["steps_per_s"]:
            return " | ".join(["no step finished", *machine])
        parts = [f"{figure(seen['samples_per_s'])} samples/s"] if seen["samples_per_s"] else []
        parts += [
            f"{figure(seen['steps_per_s'])} steps/s",
            f"waits for data {100 * (seen['data_wait'] or 0.0):.0f} %",
            *machine,
        ]
        if self.known.get("ideal_ms"):
            parts.append(f"MFU {self.known['ideal_ms'] * seen['steps_per_s'] / 10:.0f} %")
        return " | ".join(parts)

    def close(self) -> None:
        """Release the row. Does nothing in a forked process."""
        if os.getpid() == self.pid:
            self.drawing.stop()
            with suppress(OSError, ValueError):
                if self.row is not None:
                    self.row.close()


class StatusRow:
    """The last row of a terminal.

    Uses DEC's DECSTBM, DECSC and DECRC, which all current terminals support."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.rows = 0

    def draw(self, text: str) -> None:
        columns, rows = os.get_terminal_size(self.stream.fileno())
        if rows < 3:
            return
        words = ""
        if rows != self.rows:
            # Move one line down, so that the program's last line is not in our row.
            # After that, only the rows above scroll.
            words, self.rows = f"\n\x1b7\x1b[1;{rows - 1}r\x1b8\x1b[1A", rows
        self._write(
            f"{words}\x1b7\x1b[{rows};1H\x1b[2K\x1b[2m{('flatout: ' + text)[: columns - 1]}\x1b[0m\x1b8"
        )

    def close(self) -> None:
        if self.rows:
            self._write(f"\x1b7\x1b[{self.rows};1H\x1b[2K\x1b[r\x1b8")
            self.rows = 0

    def _write(self, words: str) -> None:
        self.stream.write(words)
        self.stream.flush()
