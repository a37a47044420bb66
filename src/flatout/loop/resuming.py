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

from flatout.checkpoint.checkpoints import Checkpoint, CheckpointFolder, verified
from flatout.checkpoint.joint_checkpoint import part_of
from flatout.job import heartbeat
from flatout.job.folder import read_json
from flatout.loop.rank_group import RankGroup
from flatout.schema.errors import CheckpointError, FlatoutError, LoopError

LOGGER = logging.getLogger("flatout")
CHECKPOINT_KIND = "loop"
TRIAL_ENTRY = "flatout.trial."


def is_trial_process() -> bool:
    """Whether flatout measures this process. Such a process does not resume and leaves nothing behind."""
    path = os.environ.get("FLATOUT_JOB")
    job = read_json(Path(path)) if path else None
    return isinstance(job, dict) and str(job.get("entry", "")).startswith(TRIAL_ENTRY)


@dataclass
class OpenedCheckpoints:
    """``checkpoint`` is the checkpoint to resume from, None for a new training.

    ``damaged``: the new paths of newer, corrupt checkpoints. ``writer_pid``: the process that makes the
    folders of new checkpoints.
    """

    folder: CheckpointFolder
    checkpoint: Checkpoint | None
    damaged: list[Path]
    writer_pid: int

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self.checkpoint.manifest.metadata) if self.checkpoint is not None else {}


def open_checkpoints(folder: Path, from_scratch: bool, group: RankGroup | None) -> OpenedCheckpoints:
    """Open a checkpoint folder.

    Raises CheckpointError if there are checkpoints and all are corrupt, StorageError if the folder cannot be
    written.
    """
    if not from_scratch:
        heartbeat.resumes_by_itself(folder)
    if group is None:
        return _open_on_first_rank(folder, from_scratch)
    checkpoints: OpenedCheckpoints | None = None
    error: FlatoutError | None = None
    if group.rank == 0:
        try:
            checkpoints = _open_on_first_rank(folder, from_scratch)
        except FlatoutError as failed:
            error = failed
    local = {
        "save": str(checkpoints.checkpoint.path)
        if checkpoints is not None and checkpoints.checkpoint is not None
        else None,
        "pid": os.getpid(),
        "error": str(error or ""),
        "folder": str(folder.resolve()),
    }
    first_rank = group.broadcast(local)
    if error is not None:
        raise error
    if first_rank["error"]:
        raise CheckpointError(f"rank 0 cannot resume, so all ranks stop: {first_rank['error']}")
    if checkpoints is None:
        checkpoints = OpenedCheckpoints(
            CheckpointFolder(Path(first_rank["folder"])), None, [], first_rank["pid"]
        )
        if first_rank["save"] is not None:
            try:
                checkpoints.checkpoint = verified(Path(first_rank["save"]))
            except CheckpointError as failed:
                error = CheckpointError(
                    f"{first_rank['save']} is the checkpoint of rank 0; on this rank, {failed}. All ranks must see the same folder."
                )
    group.raise_if_any_failed(error)
    return checkpoints


def _open_on_first_rank(folder: Path, from_scratch: bool) -> OpenedCheckpoints:
    # a restarted program resumes from it by itself
    checkpoints = CheckpointFolder(folder, on_verified=heartbeat.checkpoint_written).open()
    try:
        if from_scratch:
            moved_to = checkpoints.move_all_aside()
            if moved_to is not None:
                LOGGER.info("from_scratch=True: moved the existing checkpoints to %s", moved_to)
            return OpenedCheckpoints(checkpoints, None, [], os.getpid())
        checkpoint, corrupt_checkpoints = checkpoints.newest()
        if checkpoint is not None and checkpoint.manifest.kind != CHECKPOINT_KIND:
            raise LoopError(
                f"{checkpoint.path} was not written by a flatout.Loop. Name another folder in checkpoint_dir=."
            )
        damaged = [checkpoints.set_aside(corrupt) for corrupt in corrupt_checkpoints]
    except BaseException:
        checkpoints.close()
        raise
    for corrupt, path in zip(corrupt_checkpoints, damaged, strict=True):
        LOGGER.warning(
            "checkpoint %s is corrupt: %s. It was moved to %s", corrupt.path.name, corrupt.why, path
        )
    return OpenedCheckpoints(checkpoints, checkpoint, damaged, os.getpid())


def read_states(
    torch: ModuleType, checkpoint: Checkpoint, rank: int, ranks: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of the whole training, and that of this rank. Raises CheckpointError."""
    before = checkpoint.manifest.metadata["ranks"]
    if before != ranks:
        raise CheckpointError(
            f"{checkpoint.path} is of {before} rank{'s' * (before > 1)}, and {ranks} would resume from it: each rank has its own place in "
            f"the data. Start {before} again, or use from_scratch=True to start from scratch."
        )
    state = checkpoint.read(torch)
    return state, checkpoint.read(torch, part_of(rank)) if rank else state


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
