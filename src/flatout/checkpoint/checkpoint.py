"""One checkpoint on disk, verified completely before it is used."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.checkpoint.bounded import MAX_BYTES as MAX_STATE_BYTES
from flatout.checkpoint.bounded import from_json
from flatout.checkpoint.disk import (
    FileDigest,
    digest_of_file,
    read_file,
)
from flatout.checkpoint.manifest import MAX_BYTES, Manifest
from flatout.checkpoint.tensors import read_tensors
from flatout.checkpoint.unpacking import unpack
from flatout.job import heartbeat
from flatout.schema.errors import CheckpointError

MANIFEST, DAMAGED, LOCK = "manifest.json", "damaged", "lock"
FOLDER = re.compile(r"step-(\d{8,15})(?:-(\d{1,6}))?")  # further checkpoints of a step have a number


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint: its files are, byte for byte, those in its manifest."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def read(self, torch: ModuleType, name: str = "") -> Any:
        """The state written under ``name``. Raises CheckpointError."""
        state, tensors = files_of(name)
        if state not in self.manifest.files:
            raise CheckpointError(
                f"{self.path} has no {state}: another number of ranks or another program made it."
            )
        heartbeat.checkpoint_read()
        try:
            data = read_file(self.path / state, MAX_STATE_BYTES)
            if FileDigest(len(data), hashlib.sha256(data).hexdigest()) != self.manifest.files[state]:
                raise CheckpointError(f"{state} was changed after it was verified")
            stored = self.manifest.files.get(tensors)
            return unpack(
                torch,
                from_json(data),
                read_tensors(torch, self.path / tensors, stored) if stored is not None else {},
            )
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {Path(error.filename or state).name}: {error.strerror}."
            ) from None
        except (CheckpointError, ValueError, MemoryError) as error:
            raise CheckpointError(
                f"{self.path} cannot be read: {str(error) or 'there is not enough memory'}."
            ) from None


@dataclass(frozen=True)
class CorruptCheckpoint:
    """A corrupt checkpoint and the reason, without a full stop."""

    path: Path
    why: str


def verified(path: Path) -> Checkpoint:
    """Verify every byte of a checkpoint. Raises CheckpointError with the reason, without a full stop."""
    match = FOLDER.fullmatch(path.name)
    try:
        manifest = Manifest.from_text(read_file(path / MANIFEST, MAX_BYTES))
        if match is None or int(match[1]) != manifest.step:
            raise CheckpointError(f"its manifest is of step {manifest.step}")
        for name, stored in manifest.files.items():
            if name.endswith(".json") and stored.bytes > MAX_STATE_BYTES:
                raise CheckpointError(
                    f"{name} should have {stored.bytes:,} bytes, and the maximum is {MAX_STATE_BYTES:,}"
                )
            if (actual := digest_of_file(path / name, stored)) != stored:
                raise CheckpointError(
                    f"{name} has {actual.bytes:,} bytes instead of {stored.bytes:,}"
                    if actual.bytes != stored.bytes
                    else f"{name} is not what was written: its digest differs"
                )
    except FileNotFoundError as error:
        raise CheckpointError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise CheckpointError(
            f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
        ) from None
    return Checkpoint(path, manifest)


def files_of(name: str) -> tuple[str, str]:
    return (f"{name}.json", f"{name}.safetensors") if name else ("state.json", "tensors.safetensors")
