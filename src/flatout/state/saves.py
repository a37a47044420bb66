"""The saves of one training, a folder each. The newest that can be believed is the one to go on from.

    saves/                       0700
        lock                     held by the one process that writes here
        step-00000120/           0700, made under another name and renamed when all of it is on the disk
            manifest.json        sizes and digests of the others, written last
            state.json           a state as JSON; its tensors lie beside
            tensors.safetensors
        damaged/                 saves that could not be believed, for a person to look at

Saves are ordered by the step in their name, which their manifest must repeat, never by the times of files. A save is only removed when a newer one has been
read back and found right.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from flatout.plan import pulse
from flatout.plan.errors import SaveError, StorageError
from flatout.state.disk import PRIVATE_FOLDER, Stored, flush_folder, make_folder, move_folder, read_file, remove_folder, what_is_stored, write_file
from flatout.state.lock import Lock
from flatout.state.manifest import MOST_BYTES, Manifest
from flatout.state.tensors import read_tensors, write_tensors
from flatout.state.values import Packed, unpack

MANIFEST, DAMAGED, LOCK = "manifest.json", "damaged", "lock"
FOLDER = re.compile(r"step-(\d{8,15})(?:-(\d{1,6}))?")  # the second, third, ... of a step has its number behind it
UNFINISHED = re.compile(r"\.(writing|leaving)-.*")
MOST_STATE_BYTES = 1 << 30
KEEP = 3


@dataclass(frozen=True)
class Save:
    """A save whose files are, byte for byte, those that its manifest names."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def read(self, torch: Any, name: str = "") -> Any:
        """The state that was written under ``name``. Raises SaveError."""
        state, tensors = _files_of(name)
        if state not in self.manifest.files:
            raise SaveError(f"{self.path} has no {state}: it was made by another number of ranks, or for something else.")
        pulse.went_on()
        try:
            tree = json.loads(read_file(self.path / state, MOST_STATE_BYTES).decode("utf-8"))
            return unpack(torch, tree, read_tensors(self.path / tensors) if tensors in self.manifest.files else {})
        except (SaveError, OSError, ValueError, RecursionError) as error:
            raise SaveError(f"{self.path} cannot be read: {error}.") from None


@dataclass(frozen=True)
class Bad:
    """A save that cannot be believed, and why: a sentence without its stop."""

    path: Path
    why: str


def believed(path: Path) -> Save:
    """The save in a folder, every byte of it looked at. Raises SaveError: why it cannot be believed, a sentence without its stop."""
    named = FOLDER.fullmatch(path.name)
    try:
        manifest = Manifest.from_text(read_file(path / MANIFEST, MOST_BYTES))
        if named is None or int(named[1]) != manifest.step:
            raise SaveError(f"its manifest is of step {manifest.step}")
        for name, stored in manifest.files.items():
            if (found := what_is_stored(path / name)) != stored:
                raise SaveError(f"{name} has {found.bytes:,} bytes instead of {stored.bytes:,}" if found.bytes != stored.bytes else
                                f"{name} is not what was written: its digest differs")
    except FileNotFoundError as error:
        raise SaveError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise SaveError(f"{Path(error.filename or path).name} cannot be read: {error.strerror}") from None
    return Save(path, manifest)


class Saves:
    """The folder of saves. Reading needs nothing; who writes must hold the lock: ``with Saves(folder) as saves``, or ``open`` and ``close``."""

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one save must stay")
        self.folder, self.keep = folder, keep
        self._lock: Lock | None = None

    # -- reading ------------------------------------------------------------------------------------------------------------

    def paths(self) -> list[Path]:
        """All saves that are there, believed or not, the newest first. Raises StorageError."""
        try:
            found = [self.folder / name for name in os.listdir(self.folder) if FOLDER.fullmatch(name)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot read {self.folder}: {error.strerror}.") from error
        return sorted(found, key=_number, reverse=True)

    def newest(self) -> tuple[Save | None, list[Bad]]:
        """The newest save that can be believed, and the newer ones that cannot. Raises SaveError where there are saves, and none can be believed."""
        bad: list[Bad] = []
        for path in self.paths():
            try:
                return believed(path), bad
            except SaveError as error:
                bad.append(Bad(path, str(error)))
        if bad:
            raise SaveError(f"none of the {len(bad)} saves in {self.folder} can be believed; of the newest, {bad[0].path.name}, {bad[0].why}. "
                            f"Nothing was changed. To begin anew, name another folder, or move this one away.")
        return None, bad

    # -- writing ------------------------------------------------------------------------------------------------------------

    def open(self) -> Saves:
        """Take the lock; what a killed process has left half written goes. Raises StorageError, also where another process writes here."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=PRIVATE_FOLDER)
            self._lock = Lock(self.folder / LOCK)
            for name in os.listdir(self.folder):
                if UNFINISHED.fullmatch(name):
                    remove_folder(self.folder / name)
        except OSError as error:
            self.close()
            raise _refused(self.folder, error) from error
        return self

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Saves:
        return self.open()

    def __exit__(self, *what: Any) -> None:
        self.close()

    def write(self, kind: str, step: int, states: Mapping[str, Packed], told: Mapping[str, Any] | None = None) -> Save:
        """A new save of ``states`` by name, "" for the only one. It is read back and found right; then the oldest ones go. Raises StorageError, SaveError."""
        unfinished = self.begin(step)
        try:
            files: dict[str, Stored] = {}
            for name, packed in states.items():
                files |= write_state(unfinished, name, packed)
            left_out = {where: what for packed in states.values() for where, what in packed.left_out.items()}
            return self.finish(unfinished, Manifest(kind, step, files, left_out, told or {}))
        except BaseException:
            self.discard(unfinished)
            raise

    def begin(self, step: int) -> Path:
        """An empty folder for `write_state`, by one process or by many. Raises StorageError."""
        unfinished = self.folder / f".writing-{step}-{os.getpid()}"
        try:
            self.discard(unfinished)
            make_folder(unfinished)
        except OSError as error:
            raise _refused(self.folder, error) from error
        return unfinished

    def finish(self, unfinished: Path, manifest: Manifest) -> Save:
        """The manifest, and the name under which it counts. Raises StorageError, and SaveError where the disk does not give back what was written."""
        try:
            write_file(unfinished / MANIFEST, [manifest.to_text().encode()])
            flush_folder(unfinished)
            move_folder(unfinished, path := self._free(manifest.step))
        except OSError as error:
            raise _refused(self.folder, error) from error
        try:
            save = believed(path)
            if manifest.kind != "rescue":  # a program does not go on from that by itself
                pulse.saved(manifest.step)
        except SaveError as error:
            self.set_aside(Bad(path, str(error)))
            raise SaveError(f"{path} was not stored as it was written: {error}. It was put aside; older saves stay.") from None
        for old in self.paths()[self.keep:]:
            try:
                remove_folder(old)
            except OSError:
                pass  # the next save tries again
        return save

    def discard(self, unfinished: Path) -> None:
        try:
            remove_folder(unfinished)
        except OSError:
            pass  # it was never made, or goes when these saves are opened again

    def set_aside(self, bad: Bad) -> Path:
        """Where a save that cannot be believed is from now on. Raises StorageError."""
        try:
            (self.folder / DAMAGED).mkdir(exist_ok=True, mode=PRIVATE_FOLDER)
            taken = set(os.listdir(self.folder / DAMAGED))
            name = next(name for again in count() if (name := f"{bad.path.name}.{again}") not in taken)
            move_folder(bad.path, self.folder / DAMAGED / name)
            return self.folder / DAMAGED / name
        except OSError as error:
            raise _refused(self.folder, error) from error

    def _free(self, step: int) -> Path:
        """A save of the same step is not written over: it stays until the new one is known to be good."""
        taken = max((again for each, again in map(_number, self.paths()) if each == step), default=0)
        return self.folder / (f"step-{step:08d}" + (f"-{taken + 1}" if taken else ""))


def write_state(folder: Path, name: str, packed: Packed) -> dict[str, Stored]:
    """The files of one state in an unfinished save, for its manifest. Raises StorageError."""
    state, tensors = _files_of(name)
    try:
        found = {state: write_file(folder / state, [json.dumps(packed.tree, separators=(",", ":"), allow_nan=False).encode()])}
        return found | ({tensors: write_tensors(folder / tensors, packed.tensors)} if packed.tensors else {})
    except OSError as error:
        raise _refused(folder.parent, error) from error


def _files_of(name: str) -> tuple[str, str]:
    return (f"{name}.json", f"{name}.safetensors") if name else ("state.json", "tensors.safetensors")


def _number(path: Path) -> tuple[int, int]:
    match = FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _refused(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot keep saves in {folder}: {error.strerror}. Free some space there, or name a folder that can be written.")
