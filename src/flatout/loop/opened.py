"""Open the checkpoint folder of a training in one process, and agree with all ranks on the checkpoint."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.loop.company import Company
from flatout.plan import pulse
from flatout.plan.errors import FlatoutError, LoopError, SaveError
from flatout.plan.folder import read_json
from flatout.state.saves import Save, Saves, believed

LOGGER = logging.getLogger("flatout")
KIND = "loop"
MEASURED = "flatout.trial."


def measured() -> bool:
    """Whether flatout measures this process. Such a process does not resume and leaves nothing behind."""
    path = os.environ.get("FLATOUT_JOB")
    job = read_json(Path(path)) if path else None
    return isinstance(job, dict) and str(job.get("entry", "")).startswith(MEASURED)


@dataclass
class Opened:
    """``save`` is the checkpoint to resume from, None for a new training.

    ``damaged``: the new paths of newer, corrupt checkpoints. ``writer_pid``: the process that makes the
    folders of new checkpoints.
    """

    saves: Saves
    save: Save | None
    damaged: list[Path]
    writer_pid: int

    @property
    def told(self) -> dict[str, Any]:
        return dict(self.save.manifest.told) if self.save is not None else {}


def opened(folder: Path, fresh: bool, company: Company | None) -> Opened:
    """Open a checkpoint folder.

    Raises SaveError if there are checkpoints and all are corrupt, StorageError if the folder cannot be
    written.
    """
    if not fresh:
        pulse.resumes_by_itself(folder)
    if company is None:
        return _by_the_first(folder, fresh)
    found: Opened | None = None
    error: FlatoutError | None = None
    if company.rank == 0:
        try:
            found = _by_the_first(folder, fresh)
        except FlatoutError as failed:
            error = failed
    here = {"save": str(found.save.path) if found is not None and found.save is not None else None, "pid": os.getpid(), "error": str(error or ""),
            "folder": str(folder.resolve())}
    heard = company.told(here)
    if error is not None:
        raise error
    if heard["error"]:
        raise SaveError(f"rank 0 cannot resume, so all ranks stop: {heard['error']}")
    if found is None:
        found = Opened(Saves(Path(heard["folder"])), None, [], heard["pid"])
        if heard["save"] is not None:
            try:
                found.save = believed(Path(heard["save"]))
            except SaveError as failed:
                error = SaveError(f"{heard['save']} is the checkpoint of rank 0; on this rank, {failed}. All ranks must see the same folder.")
    company.all_fine(error)
    return found


def _by_the_first(folder: Path, fresh: bool) -> Opened:
    saves = Saves(folder, told=pulse.saved).open()  # a restarted program resumes from it by itself
    try:
        if fresh:
            aside = saves.begin_anew()
            if aside is not None:
                LOGGER.info("fresh=True: moved the existing checkpoints to %s", aside)
            return Opened(saves, None, [], os.getpid())
        save, bad = saves.newest()
        if save is not None and save.manifest.kind != KIND:
            raise LoopError(f"{save.path} was not written by a flatout.Loop. Name another folder in saves=.")
        damaged = [saves.set_aside(each) for each in bad]
    except BaseException:
        saves.close()
        raise
    for each, path in zip(bad, damaged, strict=True):
        LOGGER.warning("checkpoint %s is corrupt: %s. It was moved to %s", each.path.name, each.why, path)
    return Opened(saves, save, damaged, os.getpid())
