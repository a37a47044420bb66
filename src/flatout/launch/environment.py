"""The environment a program is started with, so that flatout is inside every Python process of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SITE = Path(__file__).resolve().parent.parent / "capture" / "site"

# A trial must not report to anybody's experiment tracker.
QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "COMET_OFFLINE": "1", "MLFLOW_TRACKING_URI": "", "CLEARML_OFFLINE_MODE": "1"}


def attached(job: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The present environment, with the job named and our site folder first on PYTHONPATH; ``extra`` wins."""
    environment = dict(os.environ)
    before = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = f"{SITE}{os.pathsep}{before}" if before else str(SITE)
    environment["FLATOUT_JOB"] = str(job)
    environment.update(extra)
    return environment
