"""`flatout run --watch`: a live status line on standard error, without changes to the program's output.

In a terminal the line occupies the last row, and the rows above scroll (DECSTBM, as apt's progress bar does).
If standard error is a file, a line is written every 30 s. A thread computes the figures once a second from the
counters of `flatout.agent.step_counters`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, TextIO

from flatout.agent.bootstrap import say
from flatout.agent.step_counters import StepCounters
from flatout.measure.clock import cpu_seconds, seconds
from flatout.measure.load import resident_bytes
from flatout.render.formatting import figure, size

if TYPE_CHECKING:
    from torch import device as Device

EVERY_S = {True: 1.0, False: 30.0}  # in a terminal, and in a file


class LiveLine:
    """The live line: starts with the first counted steps, and ends when the process exits."""

    def __init__(
        self,
        stream: TextIO,
        counts: StepCounters,
        torch: ModuleType,
        known: Mapping[str, float],
        device: Device,
        every_s: float | None = None,
    ) -> None:
        self.stream, self.counts, self.torch, self.known, self.device = stream, counts, torch, known, device
        self.row = StatusRow(stream) if stream.isatty() and os.environ.get("TERM", "dumb") != "dumb" else None
        self.machine = Machine(torch, device)
        self.first = (seconds(), counts.steps, counts.waited_ns)
        self.last = self.first
        self.pid = os.getpid()
        self.stopped = threading.Event()
        self.thread = threading.Thread(
            target=self._draw,
            args=(every_s or EVERY_S[self.row is not None],),
            name="flatout-watch",
            daemon=True,
        )
        self.thread.start()
        atexit.register(self.close)

    def _draw(self, every_s: float) -> None:
        try:
            while not self.stopped.wait(every_s):
                text, self.last = self.sentence(self.last), self._now()
                if self.row is not None:
                    self.row.draw(text)
                else:
                    say(text)
        except (OSError, ValueError):
            return  # standard error is closed; the program continues

    def _now(self) -> tuple[float, int, int]:
        return seconds(), self.counts.steps, self.counts.waited_ns

    def sentence(self, since: tuple[float, int, int]) -> str:
        """Return the figures since a moment, such as
        ``1,234 samples/s | 82.3 steps/s | waits for data 12 % | 1.8 of 2 cores | 1.2 GiB``."""
        now = self._now()
        passed_s = max(now[0] - since[0], 1e-9)
        steps, waited_ns = (new - old for new, old in zip(now[1:], since[1:], strict=True))
        if not steps:
            return "no step finished | " + " | ".join(self.machine.seen())
        samples = steps * self.counts.samples_a_step
        parts = [f"{figure(samples / passed_s)} samples/s"] if samples else []
        parts += [
            f"{figure(steps / passed_s)} steps/s",
            f"waits for data {100 * waited_ns / 1e9 / passed_s:.0f} %",
            *self.machine.seen(),
        ]
        if self.known.get("ideal_ms"):
            parts.append(f"MFU {self.known['ideal_ms'] * steps / 10 / passed_s:.0f} %")
        return " | ".join(parts)

    def close(self) -> None:
        """Release the row. Does nothing in a forked process."""
        if os.getpid() != self.pid or self.stopped.is_set():
            return
        self.stopped.set()
        self.thread.join(timeout=2)
        try:
            if self.row is not None:
                self.row.close()
        except (OSError, ValueError):
            return


class Machine:
    """Load of the process and of the model's ``device`` (NVML, if that is a GPU)."""

    def __init__(self, torch: ModuleType, device: Device) -> None:
        self.torch, self.device = torch, device
        self.at_s, self.used_s = seconds(), cpu_seconds()
        self.cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.nvml = _nvml(torch, device) if device.type == "cuda" else None

    def seen(self) -> list[str]:
        at_s, used_s = seconds(), cpu_seconds()
        used = (used_s - self.used_s) / max(at_s - self.at_s, 1e-9)
        self.at_s, self.used_s = at_s, used_s
        said = [f"{used:.1f} of {self.cores} cores", size(resident_bytes())]
        if self.nvml is not None:
            nvml, handle = self.nvml
            try:
                memory = nvml.nvmlDeviceGetMemoryInfo(handle)
                said.append(
                    f"GPU {nvml.nvmlDeviceGetUtilizationRates(handle).gpu} % busy, {size(int(memory.used))} of {size(int(memory.total))}"
                )
            except nvml.NVMLError:
                self.nvml = None
        elif self.device.type == "cuda":
            said.append(f"GPU memory {size(self.torch.cuda.memory_allocated(self.device))}")
        return said


def _nvml(torch: ModuleType, device: Device) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a device, found by UUID; None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        )
    except pynvml.NVMLError:
        return None


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
