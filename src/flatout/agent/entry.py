"""The entry of a real run, inside the program: starts it, and counts its steps for its record and for `--watch`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from flatout.agent.bootstrap import notify
from flatout.agent.heartbeat import counters
from flatout.agent.live_figures import LiveFigures, PeriodicThread, Reading
from flatout.agent.run_listener import MakeCheckpointing, RunListener
from flatout.agent.run_summary import Summarizer
from flatout.render.formatting import rounded, size
from flatout.schema.run_request import RunRequest

# `flatout run --watch`: a status line on standard error every 10 s, without changes to the program's output.
#
# The figures are those of `flatout.agent.live_figures`.

EVERY_S = 10.0


class LiveLine:
    """The live line: starts with the first counted steps, and ends when the process exits."""

    def __init__(self, figures: LiveFigures, known: Mapping[str, float]) -> None:
        self.figures, self.profiled = figures, known
        self.last = figures.now()
        self.pid = os.getpid()
        self.thread = PeriodicThread(EVERY_S, self._show, "flatout-watch")
        atexit.register(self.close)

    def _show(self) -> None:
        now = self.figures.now()
        text, self.last = self.sentence(self.last, now), now
        notify(text)

    def sentence(self, start: Reading, end: Reading) -> str:
        """Return the figures between two moments, such as
        ``1,234 samples/s | 82.3 steps/s | waits for data 12 % | 1.8 of 2 cores | 1.2 GiB``."""
        figures = self.figures.between(start, end)
        machine = [
            f"{figures['cores_used']:.1f} of {self.figures.cores} cores",
            size(figures["memory_bytes"] or 0),
        ]
        if figures["gpu_busy"] is not None:
            machine.append(f"GPU {figures['gpu_busy']:.0%} busy")
        if not figures["steps_per_s"]:
            return " | ".join(["no step finished", *machine])
        parts = [f"{rounded(figures['samples_per_s'])} samples/s"] if figures["samples_per_s"] else []
        parts += [
            f"{rounded(figures['steps_per_s'])} steps/s",
            f"waits for data {100 * (figures['data_wait'] or 0.0):.0f} %",
            *machine,
        ]
        if self.profiled.get("ideal_ms"):
            parts.append(f"MFU {self.profiled['ideal_ms'] * figures['steps_per_s'] / 10:.0f} %")
        return " | ".join(parts)

    def close(self) -> None:
        """Stop. Does nothing in a forked process."""
        if os.getpid() == self.pid:
            self.thread.stop()


class MonitoredRunListener(RunListener):
    """Counts steps once the levers are applied, when its other hooks are removed."""

    def __init__(self, request: RunRequest, torch: ModuleType, checkpoints: MakeCheckpointing) -> None:
        self.request = request
        super().__init__(request, torch, checkpoints)

    def finish_start(self) -> None:
        super().finish_start()
        request, torch = self.request, self.context.torch
        counts = counters(torch)
        counts.begin(self.context.steps)
        if request.summary is not None:
            Summarizer(request.summary, self.plan.to_json(), counts, torch, self.real_files)
        if request.live_line is not None and self.prints:
            LiveLine(LiveFigures(torch, counts), request.live_line)


def attach(job: dict[str, Any]) -> None:
    """Attach to a program that keeps no checkpoints. The bootstrap calls this right after ``import torch``."""
    import torch

    start(RunRequest.from_json(job), torch, lambda ledger, resumed: None)


def start(request: RunRequest, torch: ModuleType, checkpoints: MakeCheckpointing) -> None:
    counted = request.live_line is not None or request.summary is not None
    (MonitoredRunListener if counted else RunListener)(request, torch, checkpoints)
