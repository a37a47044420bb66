"""The checkpoints of a command that always restarts from its beginning.

A new run does not prune the checkpoints of earlier runs.

    rescue/                  the checkpoints of the present run
        earlier/<number>/    checkpoints of earlier runs: of the newest one, and of the one that got furthest
"""

import os
import shutil
from pathlib import Path

from flatout.checkpoint.checkpoints import CheckpointFolder
from flatout.checkpoint.disk import PRIVATE_FOLDER, make_folder, move_folder
from flatout.schema.errors import StorageError

EARLIER = "earlier"


def begin_run(checkpoints: CheckpointFolder) -> None:
    """Move existing checkpoints aside and keep those of two earlier runs. Raises StorageError."""
    paths = checkpoints.paths()
    if not paths:
        return
    earlier = checkpoints.folder / EARLIER
    try:
        earlier.mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
        number = 1 + max((int(path.name) for path in earlier_runs(checkpoints.folder)), default=0)
        make_folder(earlier / str(number))
        for path in paths:
            move_folder(path, earlier / str(number) / path.name)
    except OSError as error:
        raise StorageError(
            f"cannot move the checkpoints of an earlier run to {earlier}: {error.strerror}. Move {checkpoints.folder} away."
        ) from error
    newest, *older = earlier_runs(checkpoints.folder)
    furthest = max([newest, *older], key=_steps)
    for run in older:
        if run != furthest:
            shutil.rmtree(run, ignore_errors=True)


def earlier_runs(folder: Path) -> list[Path]:
    """The checkpoint folders of earlier runs, newest first."""
    try:
        names = os.listdir(folder / EARLIER)
    except OSError:
        return []
    return [
        folder / EARLIER / str(number)
        for number in sorted((int(name) for name in names if name.isdigit()), reverse=True)
    ]


def _steps(run: Path) -> int:
    newest = CheckpointFolder(run).paths()
    return int(newest[0].name.split("-")[1]) if newest else 0
