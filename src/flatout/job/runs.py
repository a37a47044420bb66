"""The records of a job's runs, and the removal of old ones.

<job>/runs/<time>-<pid>/rank<N>.json        <time>: start of the run, as in 20261125T110836

Live figures (`rank<N>.jsonl`), messages of trackers and any other file stay: the user asked for them.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from flatout.job.folder import read_json

RUNS = "runs"  # below the folder of a job
RUN = re.compile(r"\d{8}T\d{6}-\d+")
RECORD = re.compile(r"rank\d+(-\d+)?\.json")
FIELDS = {"schema", "rank", "how", "steps", "steps_per_s"}
MOST_AT_ONCE = 200  # a folder with many more shrinks from run to run


def run_records(runs: Path) -> dict[str, list[Path]]:
    """Return the files of each run that has a record, by the name of the run, oldest start first.

    Links are left out: they lead to files of others. A run that another process removes meanwhile is left out.
    """
    found = {}
    for run in _names(runs):
        if RUN.fullmatch(run) and not os.path.islink(runs / run):
            files = [runs / run / name for name in _names(runs / run) if RECORD.fullmatch(name)]
            if files := [path for path in files if os.path.isfile(path) and not os.path.islink(path)]:
                found[run] = files
    return found


def remove_old(runs: Path, keep: int, own: str) -> None:
    """Remove all run records but those of the ``keep`` runs that ended last, and of the run ``own``.

    Several processes may do this at once. A folder goes only if the removal of its records emptied it, so
    that of a run that has just begun stays. Raises nothing: the run itself is over.
    """
    ended = []
    for run, files in run_records(runs).items():
        with suppress(OSError):  # removed meanwhile
            ended.append((max(path.stat().st_mtime_ns for path in files), run, files))
    left = MOST_AT_ONCE
    for _, run, files in sorted(ended)[:-keep]:
        if run == own:
            continue
        for path in files:
            if left and _is_record(path):
                left -= 1
                with suppress(OSError):
                    path.unlink()
        with suppress(OSError):  # something else is in it
            (runs / run).rmdir()


def _is_record(path: Path) -> bool:
    data = read_json(path)
    return isinstance(data, dict) and data.keys() >= FIELDS


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
