"""The entry of a real run, inside the program: starts it, and counts its steps for its record and for `--watch`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from flatout.agent.heartbeat import counters
from flatout.agent.live_figures import LiveFigures
from flatout.agent.run_listener import MakeCheckpointing, RunListener
from flatout.agent.run_summary import Summarizer
from flatout.schema.run_request import RunRequest


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
            from flatout.agent.live_line import LiveLine

            LiveLine(LiveFigures(torch, counts), request.live_line)


def attach(job: dict[str, Any]) -> None:
    """Attach to a program that keeps no checkpoints. The bootstrap calls this right after ``import torch``."""
    import torch

    start(RunRequest.from_json(job), torch, lambda ledger, resumed: None)


def start(request: RunRequest, torch: ModuleType, checkpoints: MakeCheckpointing) -> None:
    counted = request.live_line is not None or request.summary is not None
    (MonitoredRunListener if counted else RunListener)(request, torch, checkpoints)
