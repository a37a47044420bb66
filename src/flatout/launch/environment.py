"""The environment of a program, which loads flatout into each of its Python processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from flatout.launch.caches import private_caches

SITE = Path(__file__).resolve().parent.parent / "agent" / "site"

# A trial must not report to an experiment tracker.
QUIET = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "COMET_OFFLINE": "1",
    "MLFLOW_TRACKING_URI": "",
    "CLEARML_OFFLINE_MODE": "1",
}
EXPLAIN = "flatout.diagnose.crash_explanation:explain"


def attached(
    job: Path,
    extra: Mapping[str, str],
    becomes: bool = False,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment ``base`` plus the job and our site folder first on PYTHONPATH; ``extra`` wins.

    ``becomes``: the program replaces this process instead of running as its child. ``base``: ours by default.
    """
    base = os.environ if base is None else base
    return {
        **listening(Path(f"{job}.explained"), becomes, base),
        **private_caches(base)[0],
        "FLATOUT_JOB": str(job),
        **extra,
    }


def listening(info: Path, becomes: bool, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return an environment with our site folder first on PYTHONPATH, only to explain tracebacks.

    The one process of the program that explains its crash creates ``info``.
    """
    return {
        **with_crash_reports(base),
        "FLATOUT_CRASH_REPORTS": str(info),
        "FLATOUT_FIRST": str(os.getpid()) if becomes else "",
    }


def with_crash_reports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with our site folder first on PYTHONPATH, so that crashes are reported."""
    before = environment.get("PYTHONPATH", "")  # kept unchanged: an empty part means the current folder
    if before.split(os.pathsep)[0] != str(SITE):
        before = f"{SITE}{os.pathsep}{before}" if before else str(SITE)
    return {"FLATOUT_EXPLAIN": EXPLAIN, **environment, "PYTHONPATH": before}
