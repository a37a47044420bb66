"""The environment a program is started with, so that flatout is inside every Python process of it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flatout.launch.caches import private_caches

SITE = Path(__file__).resolve().parent.parent / "capture" / "site"

# A trial must not report to anybody's experiment tracker.
QUIET = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "COMET_OFFLINE": "1", "MLFLOW_TRACKING_URI": "", "CLEARML_OFFLINE_MODE": "1"}
EXPLAIN = "flatout.cli.underneath:explain"


def attached(job: Path, extra: Mapping[str, str], becomes: bool = False) -> dict[str, str]:
    """The present environment, with the job named and our site folder first on PYTHONPATH; ``extra`` wins.

    ``becomes`` says that this process will be replaced by the program, and not start it as a child.
    """
    return {**listening(Path(f"{job}.explained"), becomes), **private_caches(os.environ)[0], "FLATOUT_JOB": str(job), **extra}


def listening(told: Path, becomes: bool) -> dict[str, str]:
    """The present environment, with our site folder first on PYTHONPATH for the explanation under a traceback, and for nothing else.

    ``told`` will be made by the one process of the program that explains its death.
    """
    return {**heard(os.environ), "FLATOUT_TOLD": str(told), "FLATOUT_FIRST": str(os.getpid()) if becomes else ""}


def heard(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment with our site folder first on PYTHONPATH, so that the last words of each Python process are heard."""
    before = environment.get("PYTHONPATH", "")  # kept as it is: an empty part of it is the current folder
    if before.split(os.pathsep)[0] != str(SITE):
        before = f"{SITE}{os.pathsep}{before}" if before else str(SITE)
    return {"FLATOUT_EXPLAIN": EXPLAIN, **environment, "PYTHONPATH": before}
