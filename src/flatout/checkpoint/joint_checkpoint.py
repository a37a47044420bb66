"""Write one checkpoint from several ranks.

Each rank writes its own part into one folder; rank 0 waits for all and writes the manifest. Ranks communicate
only through the folder: the writing threads must not use collectives, which the training may be using.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.checkpoint.checkpoints import Checkpoint, CheckpointFolder, write_state
from flatout.checkpoint.disk import FileDigest, read_file, write_file
from flatout.checkpoint.manifest import Manifest
from flatout.checkpoint.values import Packed
from flatout.schema.errors import CheckpointError, StorageError

TIMEOUT_S = 120.0
POLL_S = 0.02
MAX_NOTE_BYTES = 1 << 16


def part_of(rank: int) -> str:
    """The name of a rank's part in a checkpoint; rank 0's part is the checkpoint's own state."""
    return f"rank{rank}" if rank else ""


@dataclass(frozen=True)
class JointCheckpointWriter:
    """``folder_pid`` is the process of rank 0; its number is in the name of the unfinished folder."""

    checkpoints: CheckpointFolder
    kind: str
    rank: int
    ranks: int
    folder_pid: int
    why_not_write: Callable[[Packed], str]
    wall_s: Callable[[], float]
    sleep: Callable[[float], None]

    def write(self, step: int, packed: Packed, metadata: Mapping[str, Any]) -> Checkpoint | None:
        """The checkpoint on rank 0, None on the others. Raises StorageError, CheckpointError."""
        if self.rank == 0:
            return self._collect(step, packed, metadata)
        self._write_part(step, packed)
        return None

    def _begin(self, step: int, packed: Packed) -> Path:
        for note in self.checkpoints.folder.glob(".none-*"):
            note.unlink(missing_ok=True)
        try:
            if why_not := self.why_not_write(packed):
                raise CheckpointError(f"{why_not}. Earlier checkpoints stay.")
            return self.checkpoints.begin(step)
        except BaseException:
            self._failure_marker(step).touch()
            raise

    def _failure_marker(self, step: int) -> Path:
        return self.checkpoints.folder / f".none-{step}-{self.folder_pid}"

    def _collect(self, step: int, packed: Packed, metadata: Mapping[str, Any]) -> Checkpoint:
        unfinished = self._begin(step, packed)
        try:
            files, left_out = write_state(unfinished, "", packed), dict(packed.left_out)
            for rank in range(1, self.ranks):
                note = unfinished / f"{part_of(rank)}.note"
                self._until(
                    note.exists,
                    f"rank {rank} did not write its part within {TIMEOUT_S:.0f} s. All ranks must see the same folder "
                    f"{self.checkpoints.folder}",
                )
                part = json.loads(read_file(note, MAX_NOTE_BYTES))
                files |= {name: FileDigest(size, digest) for name, (size, digest) in part["files"].items()}
                left_out |= {f"rank {rank}: {where}": what for where, what in part["left_out"].items()}
                note.unlink()
            return self.checkpoints.finish(unfinished, Manifest(self.kind, step, files, left_out, metadata))
        except OSError as error:
            self.checkpoints.discard(unfinished)
            raise self._cannot_write(error) from error
        except BaseException:
            self.checkpoints.discard(unfinished)
            raise

    def _write_part(self, step: int, packed: Packed) -> None:
        unfinished = self.checkpoints.folder / f".writing-{step}-{self.folder_pid}"
        self._until(
            lambda: unfinished.exists() or self._failure_marker(step).exists(),
            f"rank 0 did not create its folder within {TIMEOUT_S:.0f} s. All ranks must see the same folder {self.checkpoints.folder}",
        )
        if not unfinished.exists():
            raise StorageError("rank 0 could not start the checkpoint.")
        name = part_of(self.rank)
        stored = write_state(unfinished, name, packed)
        note = {
            "files": {file: (content.bytes, content.sha256) for file, content in stored.items()},
            "left_out": packed.left_out,
        }
        try:
            write_file(unfinished / f"{name}.half", [json.dumps(note).encode()])
            os.rename(unfinished / f"{name}.half", unfinished / f"{name}.note")
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write checkpoints in {self.checkpoints.folder}: {error.strerror}.")

    def _until(self, is_ready: Callable[[], bool], why_not: str) -> None:
        end_s = self.wall_s() + TIMEOUT_S
        while not is_ready():
            if self.wall_s() > end_s:
                raise StorageError(f"{why_not}.")
            self.sleep(POLL_S)
