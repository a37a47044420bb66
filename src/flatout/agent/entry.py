"""The entry of a real run, inside the program: starts it, counted or not."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from flatout.agent.attached import Attached, MakeCheckpointing
from flatout.schema.run_request import RunRequest


def attach(job: dict[str, Any]) -> None:
    """Attach to a program that keeps no checkpoints. The bootstrap calls this right after ``import torch``."""
    import torch

    start(RunRequest.from_json(job), torch, lambda ledger, resumed: None)


def start(request: RunRequest, torch: ModuleType, checkpoints: MakeCheckpointing) -> None:
    if request.watch is None and request.summary is None:
        Attached(request, torch, checkpoints)
    else:
        from flatout.agent.monitored_run import MonitoredRun

        MonitoredRun(request, torch, checkpoints)
