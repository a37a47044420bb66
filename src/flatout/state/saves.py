"""The saves of one training, a folder each. The newest that can be believed is the one to go on from.

    saves/                       0700
        lock                     held by the one process that writes here
        step-00000120/           0700, made under another name and renamed when all of it is on the disk
            manifest.json        sizes and digests of the others, written last
            state.json           a state as JSON; its tensors lie beside
            tensors.safetensors
        damaged/                 saves that could not be believed, for a person to look at
        before-1/                saves of a training that was begun anew

Saves are ordered by the step in their name, which their manifest must repeat, never by the times of files. A save is only removed when a newer one has been
read back and found right.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from flatout.plan import pulse
from flatout.plan.errors import SaveError, StorageError
from flatout.state.bounded import MOST_BYTES as MOST_STATE_BYTES
from flatout.state.bounded import from_json, to_json
from flatout.state.disk import Stored, flush_folder, make_folder, move_folder, read_file, remove_folder, what_is_stored, write_file
from flatout.state.lock import Lock
from flatout.state.manifest import MOST_BYTES, Manifest
from flatout.state.tensors import read_tensors, write_tensors
from flatout.state.values import Packed, unpack

MANIFEST, DAMAGED, LOCK = "manifest.json", "damaged", "lock"
FOLDER = re.compile(r"step-(\d{8,15})(?:-(\d{1,6}))?")  # the second, third, ... of a step has its number behind it
UNFINISHED = re.compile(r"\.(writing|leaving)-.*")
MOST_STEPS = 10 ** 15 - 1  # as many digits as a name has room for
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
            data = read_file(self.path / state, MOST_STATE_BYTES)
            if Stored(len(data), hashlib.sha256(data).hexdigest()) != self.manifest.files[state]:
                raise SaveError(f"{state} was changed since it was found right")
            stored = self.manifest.files.get(tensors)
            return unpack(torch, from_json(data), read_tensors(torch, self.path / tensors, stored) if stored is not None else {})
        except OSError as error:
            raise SaveError(f"{self.path} cannot be read: {Path(error.filename or state).name}: {error.strerror}.") from None
        except (SaveError, ValueError, MemoryError) as error:
            raise SaveError(f"{self.path} cannot be read: {str(error) or 'there is not enough memory'}.") from None


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
            if name.endswith(".json") and stored.bytes > MOST_STATE_BYTES:
                raise SaveError(f"{name} is said to have {stored.bytes:,} bytes, and {MOST_STATE_BYTES:,} are the most")
            if (found := what_is_stored(path / name, stored)) != stored:
                raise SaveError(f"{name} has {found.bytes:,} bytes instead of {stored.bytes:,}" if found.bytes != stored.bytes else
                                f"{name} is not what was written: its digest differs")
    except FileNotFoundError as error:
        raise SaveError(f"{Path(error.filename).name} is missing") from None
    except OSError as error:
        raise SaveError(f"{Path(error.filename or path).name} cannot be read: {error.strerror}") from None
    return Save(path, manifest)


class Saves:
    """The folder of saves. Reading needs nothing; who writes must hold the lock: ``with Saves(folder) as saves``, or ``open`` and ``close``. ``told`` hears the
    step of each save that was found right."""

    def __init__(self, folder: Path, keep: int = KEEP, told: Callable[[int], None] = lambda step: None) -> None:
        if keep < 1:
            raise ValueError(f"keep={keep}: at least one save must stay")
        self.folder, self.keep, self.told = folder, keep, told
        self._lock: Lock | None = None
        self._writes = False

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
        self._writes = True
        try:
            if not self.folder.is_dir():
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                make_folder(self.folder)
                flush_folder(self.folder.parent)
            self._lock = Lock(self.folder / LOCK)
            for name in os.listdir(self.folder):
                if UNFINISHED.fullmatch(name):
                    self.discard(self.folder / name)
        except OSError as error:
            self._let_go()
            raise _refused(self.folder, error) from error
        return self

    def close(self) -> None:
        self._writes = False
        self._let_go()

    def _let_go(self) -> None:
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
        if not 0 <= step <= MOST_STEPS:
            raise SaveError(f"a save of step {step} would have no name: steps are counted from 0 to {MOST_STEPS:,}")
        unfinished = self.folder / f".writing-{step}-{os.getpid()}"
        if self._writes and (self._lock is None or not self._lock.holds):  # the folder has vanished, or come back: what we hold is a lock of nothing
            self._let_go()
            self.open()
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
            self.told(manifest.step)
        except SaveError as error:
            self.set_aside(Bad(path, str(error)))
            raise SaveError(f"{path} was not stored as it was written: {error}. It was put aside; older saves stay.") from None
        for old in self._older_than(path)[self.keep - 1:]:
            self.discard(old)
        return save

    def discard(self, folder: Path) -> None:
        """As far as it can be; the next save, or whoever opens these saves again, goes on with it."""
        try:
            remove_folder(folder)
        except OSError:
            pass

    def _older_than(self, path: Path) -> list[Path]:
        """Before the save in ``path``, the newest first. What has a higher number and cannot be believed does not count as one that is kept."""
        return [each for each in self.paths() if _number(each) < _number(path)]

    def set_aside(self, bad: Bad) -> Path:
        """Where a save that cannot be believed is from now on. Raises StorageError."""
        try:
            if not (self.folder / DAMAGED).is_dir():
                make_folder(self.folder / DAMAGED)
            taken = set(os.listdir(self.folder / DAMAGED))
            name = next(name for again in count() if (name := f"{bad.path.name}.{again}") not in taken)
            move_folder(bad.path, self.folder / DAMAGED / name)
            return self.folder / DAMAGED / name
        except OSError as error:
            raise _refused(self.folder, error) from error

    def begin_anew(self) -> Path | None:
        """All saves, believed or not, go into a folder beside; that folder, or None where there was no save. Raises StorageError."""
        paths = self.paths()
        if not paths:
            return None
        try:
            aside = next(path for number in count(1) if not (path := self.folder / f"before-{number}").exists())
            make_folder(aside)
            for path in paths:
                move_folder(path, aside / path.name)
            flush_folder(self.folder)
        except OSError as error:
            raise _refused(self.folder, error) from error
        return aside

    def _free(self, step: int) -> Path:
        """A save of the same step is not written over: it stays until the new one is known to be good."""
        taken = max((again for each, again in map(_number, self.paths()) if each == step), default=0)
        return self.folder / (f"step-{step:08d}" + (f"-{taken + 1}" if taken else ""))


def write_state(folder: Path, name: str, packed: Packed) -> dict[str, Stored]:
    """The files of one state in an unfinished save, for its manifest. Raises StorageError, and SaveError for plain values without measure."""
    state, tensors = _files_of(name)
    try:
        found = {state: write_file(folder / state, [to_json(packed.tree)])}
        return found | ({tensors: write_tensors(folder / tensors, packed.tensors)} if packed.tensors else {})
    except OSError as error:
        raise _refused(folder.parent, error) from error


def _files_of(name: str) -> tuple[str, str]:
    return (f"{name}.json", f"{name}.safetensors") if name else ("state.json", "tensors.safetensors")


def step_of(path: Path) -> int:
    """By the name of its folder."""
    return _number(path)[0]


def _number(path: Path) -> tuple[int, int]:
    match = FOLDER.fullmatch(path.name)
    assert match is not None
    return int(match[1]), int(match[2] or 1)


def _refused(folder: Path, error: OSError) -> StorageError:
    return StorageError(f"cannot keep saves in {folder}: {error.strerror}. Free some space there, or name a folder that can be written.")
