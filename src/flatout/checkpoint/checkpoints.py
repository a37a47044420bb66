"""The checkpoints of one training, a folder each. A program resumes from the newest valid one.

    saves/                       0700
        lock                     held by the one process that writes here
        step-00000120/           0700, written under another name and renamed once all of it is on the disk
            manifest.json        sizes and digests of the others, written last
            state.json           a state as JSON; its tensors are in the file below
            tensors.safetensors
        damaged/                 corrupt checkpoints, for inspection
        before-1/                checkpoints from before a start from scratch

Checkpoints are ordered by the step in their name, never by file times. Their manifest must repeat the step. A
checkpoint is removed only after a newer one has been read back and verified.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.checkpoint.disk import (
    MAX_JSON_BYTES,
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    FileDigest,
    digest_of_file,
    flush_folder,
    from_json,
    make_folder,
    move_folder,
    read_file,
    remove_folder,
    to_json,
    write_file,
)
from flatout.checkpoint.manifest import MAX_BYTES, Manifest
from flatout.checkpoint.tensors import read_tensors, write_tensors
from flatout.checkpoint.values import Packed, unpack
from flatout.job import heartbeat
from flatout.job.streams import avoid_closed_streams
from flatout.schema.errors import CheckpointError, StorageError

# by this process: the kernel would grant it its own lock twice. A child does not hold its parent's locks
_pids_of_locks: dict[str, int] = {}


class Lock:
    """Held until ``release`` or the end of the process, however it ends. Children do not inherit it.

    The file stays and names its last holder. This is the kernel's lock that works over NFS and that loader
    workers do not inherit. Its drawback: it is lost when this process opens and closes the file again for any
    reason."""

    @avoid_closed_streams()
    def __init__(self, path: Path) -> None:
        """Raises StorageError if another process holds it, OSError if the file cannot be written."""
        self.path, self._name = path, os.path.realpath(path)
        if _pids_of_locks.get(self._name) == os.getpid():
            raise StorageError(
                f"this process already writes checkpoints in {path.parent}. Use a separate folder for each training."
            )
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            os.fchmod(self._handle, PRIVATE_FILE)
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_holder()
        except OSError as error:
            holder = os.pread(self._handle, 200, 0).decode(errors="replace")
            os.close(self._handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StorageError(
                    f"another process writes checkpoints in {path.parent} ({_holder_name(holder)}). Wait for it, end it, or use another folder for "
                    "this training."
                ) from None
            raise
        _pids_of_locks[self._name] = os.getpid()
        self._owner = os.getpid()

    def _write_holder(self) -> None:
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds, but its holder has no name

    @property
    def is_valid(self) -> bool:
        """Whether the locked file is still the one that other processes find."""
        try:
            return self._handle >= 0 and os.path.samestat(
                os.fstat(self._handle), os.stat(self.path, follow_symlinks=False)
            )
        except OSError:
            return False

    def release(self) -> None:
        if self._handle >= 0 and os.getpid() == self._owner:
            os.close(self._handle)
            _pids_of_locks.pop(self._name, None)
        self._handle = -1


def _holder_name(text: str) -> str:
    try:
        metadata = json.loads(text)
        return f"process {int(metadata['pid'])} on {str(metadata['host'])[:64]!r}"
    except (ValueError, KeyError, TypeError):
        return "of unknown identity"


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
            data = read_file(self.path / state, MAX_JSON_BYTES)
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
            if name.endswith(".json") and stored.bytes > MAX_JSON_BYTES:
                raise CheckpointError(
                    f"{name} should have {stored.bytes:,} bytes, and the maximum is {MAX_JSON_BYTES:,}"
                )
            actual = digest_of_file(path / name, stored)
            if actual.bytes != stored.bytes:
                raise CheckpointError(f"{name} has {actual.bytes:,} bytes instead of {stored.bytes:,}")
            if actual != stored:
                raise CheckpointError(f"{name} is not what was written: its digest differs")
    except FileNotFoundError as error:
        raise CheckpointError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise CheckpointError(
            f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
        ) from None
    return Checkpoint(path, manifest)


def files_of(name: str) -> tuple[str, str]:
    return (f"{name}.json", f"{name}.safetensors") if name else ("state.json", "tensors.safetensors")


UNFINISHED = re.compile(r"\.(writing|removing)-.*")
MAX_STEP = 10**15 - 1  # as many digits as a name can have
KEEP = 3


class CheckpointFolder:
    """The folder of checkpoints.

    Reading needs no lock; to write, use ``with CheckpointFolder(folder) as checkpoints`` or ``open``.

    ``on_verified`` receives the step of each verified checkpoint."""

    def __init__(
        self, folder: Path, keep: int = KEEP, on_verified: Callable[[int], None] = lambda step: None
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one checkpoint must stay")
        self.folder, self.keep, self.on_verified = folder, keep, on_verified
        self._lock: Lock | None = None
        self._writes = False

    # -- reading

    def paths(self) -> list[Path]:
        """All checkpoints, valid or not, newest first. Raises StorageError."""
        try:
            found = [self.folder / name for name in os.listdir(self.folder) if FOLDER.fullmatch(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot read {self.folder}: {error.strerror}.") from error
        return sorted(found, key=_number, reverse=True)

    def newest(self) -> tuple[Checkpoint | None, list[CorruptCheckpoint]]:
        """The newest valid checkpoint, and the newer corrupt ones.

        Raises CheckpointError if there are only corrupt ones."""
        corrupt: list[CorruptCheckpoint] = []
        for path in self.paths():
            try:
                return verified(path), corrupt
            except CheckpointError as error:
                corrupt.append(CorruptCheckpoint(path, str(error)))
        if corrupt:
            raise CheckpointError(
                f"all {len(corrupt)} checkpoints in {self.folder} are corrupt; in the newest, {corrupt[0].path.name}, {corrupt[0].why}. "
                f"Nothing was changed. To start from scratch, name another folder, or move this one away."
            )
        return None, corrupt

    # -- writing

    def open(self) -> CheckpointFolder:
        """Take the lock and remove unfinished checkpoints.

        Raises StorageError, also if another process writes here."""
        self._writes = True
        try:
            with writing_to(self.folder):
                if not self.folder.is_dir():
                    self.folder.parent.mkdir(parents=True, exist_ok=True)
                    make_folder(self.folder)
                    flush_folder(self.folder.parent)
                self._lock = Lock(self.folder / LOCK)
                for name in os.listdir(self.folder):
                    if UNFINISHED.fullmatch(name):
                        self.discard(self.folder / name)
        except StorageError:
            self._release_lock()
            raise
        return self

    def close(self) -> None:
        self._writes = False
        self._release_lock()

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> CheckpointFolder:
        return self.open()

    def __exit__(self, *what: object) -> None:
        self.close()

    def write(
        self, kind: str, step: int, states: Mapping[str, Packed], metadata: Mapping[str, Any] | None = None
    ) -> Checkpoint:
        """Write ``states`` by name ("" for a single one) as a new checkpoint and verify it.

        Then delete the oldest checkpoints. Raises StorageError, CheckpointError."""
        unfinished = self.begin(step)
        try:
            files: dict[str, FileDigest] = {}
            for name, packed in states.items():
                files |= write_state(unfinished, name, packed)
            left_out = {where: what for packed in states.values() for where, what in packed.left_out.items()}
            return self.finish(unfinished, Manifest(kind, step, files, left_out, metadata or {}))
        except BaseException:
            self.discard(unfinished)
            raise

    def begin(self, step: int) -> Path:
        """Create an empty folder for `write_state`, used by one process or several. Raises StorageError."""
        if not 0 <= step <= MAX_STEP:
            raise CheckpointError(
                f"a checkpoint of step {step} cannot be named: steps range from 0 to {MAX_STEP:,}."
            )
        unfinished = self.folder / f".writing-{step}-{os.getpid()}"
        # the folder has vanished or was replaced: the lock is void
        if self._writes and (self._lock is None or not self._lock.is_valid):
            self._release_lock()
            self.open()
        with writing_to(self.folder):
            self.discard(unfinished)
            make_folder(unfinished)
        return unfinished

    def finish(self, unfinished: Path, manifest: Manifest) -> Checkpoint:
        """Write the manifest and give the checkpoint its final name. Raises StorageError.

        Raises CheckpointError if the disk does not return what was written."""
        with writing_to(self.folder):
            write_file(unfinished / MANIFEST, [manifest.to_text().encode()])
            flush_folder(unfinished)
            move_folder(unfinished, path := self._free_path(manifest.step))
        try:
            checkpoint = verified(path)
            self.on_verified(manifest.step)
        except CheckpointError as error:
            self.set_aside(CorruptCheckpoint(path, str(error)))
            raise CheckpointError(
                f"{path} was not stored as it was written: {error}. It was moved aside; older checkpoints stay."
            ) from None
        older = [other for other in self.paths() if _number(other) < _number(path)]
        for old in older[self.keep - 1 :]:
            self.discard(old)
        return checkpoint

    def discard(self, folder: Path) -> None:
        """Delete as much as possible of a folder.

        The next checkpoint, or the next process to open the folder, deletes the rest."""
        try:
            remove_folder(folder)
        except OSError:
            pass

    def set_aside(self, corrupt: CorruptCheckpoint) -> Path:
        """Move a corrupt checkpoint to the folder of damaged ones and return its new path.

        Raises StorageError."""
        damaged = self.folder / DAMAGED
        with writing_to(self.folder):
            if not damaged.is_dir():
                make_folder(damaged)
            taken = set(os.listdir(damaged))
            name = next(name for number in count() if (name := f"{corrupt.path.name}.{number}") not in taken)
            move_folder(corrupt.path, damaged / name)
        return damaged / name

    def move_all_aside(self) -> Path | None:
        """Move all checkpoints, valid or not, to a subfolder and return it; None if there was none.

        Raises StorageError."""
        paths = self.paths()
        if not paths:
            return None
        with writing_to(self.folder):
            aside = next(
                path for number in count(1) if not (path := self.folder / f"before-{number}").exists()
            )
            make_folder(aside)
            for path in paths:
                move_folder(path, aside / path.name)
            flush_folder(self.folder)
        return aside

    def _free_path(self, step: int) -> Path:
        """A new path.

        A checkpoint of the same step is not overwritten: it stays until the new one is verified."""
        taken = max((number for each, number in map(_number, self.paths()) if each == step), default=0)
        return self.folder / (f"step-{step:08d}" + (f"-{taken + 1}" if taken else ""))


def write_state(folder: Path, name: str, packed: Packed) -> dict[str, FileDigest]:
    """Write the files of one state into an unfinished checkpoint. Raises StorageError.

    Raises CheckpointError if the plain values are too large."""
    state, tensors = files_of(name)
    with writing_to(folder.parent):
        files = {state: write_file(folder / state, [to_json(packed.tree)])}
        if packed.tensors:
            files[tensors] = write_tensors(folder / tensors, packed.tensors)
    return files


def step_of(path: Path) -> int:
    """The step, from the name of the folder."""
    return _number(path)[0]


def _number(path: Path) -> tuple[int, int]:
    match = FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Raises StorageError for an OSError inside this context."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot write checkpoints in {folder}: {error.strerror}. Free some space there, or name a writable folder."
        ) from error


# The checkpoints of a command that always restarts from its beginning.
#
# A new run does not prune the checkpoints of earlier runs.
#
# rescue/                  the checkpoints of the present run
# earlier/<number>/    checkpoints of earlier runs: of the newest one, and of the one that got furthest

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
    runs = [path for path in (folder / EARLIER).glob("*") if path.name.isdigit()]
    return sorted(runs, key=lambda run: int(run.name), reverse=True)


def _steps(run: Path) -> int:
    newest = CheckpointFolder(run).paths()
    return step_of(newest[0]) if newest else 0
