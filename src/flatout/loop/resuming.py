"""What a Loop resumes from: opens the checkpoint folder, reads the parts that this rank needs, reports the result.

One process opens the folder, and all ranks use the checkpoint that it chose.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.checkpoint.checkpoint import Checkpoint, verified
from flatout.checkpoint.checkpoints import CheckpointFolder
from flatout.checkpoint.joint_checkpoint import part_of
from flatout.job import heartbeat
from flatout.job.folder import read_json
from flatout.loop.rank_group import RankGroup
from flatout.schema.errors import FlatoutError, LoopError, SaveError

LOGGER = logging.getLogger("flatout")
KIND = "loop"
MEASURED = "flatout.trial."


def measured() -> bool:
    """Whether flatout measures this process. Such a process does not resume and leaves nothing behind."""
    path = os.environ.get("FLATOUT_JOB")
    job = read_json(Path(path)) if path else None
    return isinstance(job, dict) and str(job.get("entry", "")).startswith(MEASURED)


@dataclass
class OpenedCheckpoints:
    """``save`` is the checkpoint to resume from, None for a new training.

    ``damaged``: the new paths of newer, corrupt checkpoints. ``writer_pid``: the process that makes the
    folders of new checkpoints.
    """

    saves: CheckpointFolder
    save: Checkpoint | None
    damaged: list[Path]
    writer_pid: int

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.save.manifest.metadata) if self.save is not None else {}


def opened(folder: Path, from_scratch: bool, group: RankGroup | None) -> OpenedCheckpoints:
    """Open a checkpoint folder.

    Raises SaveError if there are checkpoints and all are corrupt, StorageError if the folder cannot be
    written.
    """
    if not from_scratch:
        heartbeat.resumes_by_itself(folder)
    if group is None:
        return _by_the_first(folder, from_scratch)
    checkpoints: OpenedCheckpoints | None = None
    error: FlatoutError | None = None
    if group.rank == 0:
        try:
            checkpoints = _by_the_first(folder, from_scratch)
        except FlatoutError as failed:
            error = failed
    here = {
        "save": str(checkpoints.save.path)
        if checkpoints is not None and checkpoints.save is not None
        else None,
        "pid": os.getpid(),
        "error": str(error or ""),
        "folder": str(folder.resolve()),
    }
    observed = group.broadcast(here)
    if error is not None:
        raise error
    if observed["error"]:
        raise SaveError(f"rank 0 cannot resume, so all ranks stop: {observed['error']}")
    if checkpoints is None:
        checkpoints = OpenedCheckpoints(CheckpointFolder(Path(observed["folder"])), None, [], observed["pid"])
        if observed["save"] is not None:
            try:
                checkpoints.save = verified(Path(observed["save"]))
            except SaveError as failed:
                error = SaveError(
                    f"{observed['save']} is the checkpoint of rank 0; on this rank, {failed}. All ranks must see the same folder."
                )
    group.all_fine(error)
    return checkpoints


def _by_the_first(folder: Path, from_scratch: bool) -> OpenedCheckpoints:
    saves = CheckpointFolder(
        folder, metadata=heartbeat.checkpoint_written
    ).open()  # a restarted program resumes from it by itself
    try:
        if from_scratch:
            aside = saves.move_all_aside()
            if aside is not None:
                LOGGER.info("from_scratch=True: moved the existing checkpoints to %s", aside)
            return OpenedCheckpoints(saves, None, [], os.getpid())
        save, bad = saves.newest()
        if save is not None and save.manifest.kind != KIND:
            raise LoopError(
                f"{save.path} was not written by a flatout.Loop. Name another folder in checkpoint_dir=."
            )
        damaged = [saves.set_aside(corrupt) for corrupt in bad]
    except BaseException:
        saves.close()
        raise
    for corrupt, path in zip(bad, damaged, strict=True):
        LOGGER.warning(
            "checkpoint %s is corrupt: %s. It was moved to %s", corrupt.path.name, corrupt.why, path
        )
    return OpenedCheckpoints(saves, save, damaged, os.getpid())


def parts_of(
    torch: ModuleType, save: Checkpoint, rank: int, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the whole training, and that of this rank. Raises SaveError."""
    before = save.manifest.metadata["ranks"]
    if before != ranks:
        raise SaveError(
            f"{save.path} is of {before} rank{'s' * (before > 1)}, and {ranks} would resume from it: each rank has its own place in "
            f"the data. Start {before} again, or use from_scratch=True to start from scratch."
        )
    state = save.read(torch)
    return state, save.read(torch, part_of(rank)) if rank else state


@dataclass(frozen=True)
class Resumed:
    """Result of resuming, as ``loop.resumed``.

    ``step``: optimizer steps already done. ``epoch``: from 0. ``path``: the checkpoint. ``differs``:
    differences in the environment since. ``inexact``: state that was not, or could not be, restored exactly.
    ``damaged``: the new paths of newer, corrupt checkpoints.
    """

    step: int
    epoch: int
    path: Path
    differs: tuple[str, ...] = ()
    inexact: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether the training will end bitwise identical to an uninterrupted one."""
        return not self.differs and not self.inexact

    def sentences(self) -> list[str]:
        sentences = [f"{path} is a newer, corrupt checkpoint; it was moved there" for path in self.damaged]
        sentences.append(
            f"resuming after step {self.step}, in epoch {self.epoch}, from {self.path}: "
            + ("bitwise exact" if self.exact else "not bitwise identical to an uninterrupted run")
        )
        return [
            *sentences,
            *(f"differs: {reason}" for reason in self.differs),
            *(f"not exact: {reason}" for reason in self.inexact),
        ]
