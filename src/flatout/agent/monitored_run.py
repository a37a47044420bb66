"""A run under a plan that is counted until its end: for its record, and for the live line of `--watch`."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.agent.attached import Attached, MakeCheckpointing
from flatout.agent.live_figures import LiveFigures
from flatout.agent.run_summary import Summarizer
from flatout.agent.step_counters import counters
from flatout.schema.run_request import RunRequest

if TYPE_CHECKING:
    from torch.nn import Module


class MonitoredRun(Attached):
    """Counts steps once the levers are applied, when its other hooks are removed."""

    def __init__(self, request: RunRequest, torch: ModuleType, checkpoints: MakeCheckpointing) -> None:
        self.request = request
        self.samples = 0
        super().__init__(request, torch, checkpoints)

    def forward_begin(self, root: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count samples by the first tensor argument of the first root module."""
        first = next((value for value in (*args, *kwargs.values()) if hasattr(value, "shape")), None)
        if first is not None and len(first.shape) and root is self.context.roots[0]:
            self.samples += int(first.shape[0])

    def settled(self) -> None:
        super().settled()
        request, torch = self.request, self.context.torch
        counts = counters(torch)
        counts.begin(self.context.steps, self.samples / self.context.steps)
        if request.summary is not None:
            Summarizer(request.summary, self.plan.to_json(), counts, torch, self.real_files)
        if request.watch is not None and self.speaks and sys.stderr is not None:
            from flatout.agent.live_line import LiveLine

            LiveLine(sys.stderr, LiveFigures(torch, counts), request.watch)
