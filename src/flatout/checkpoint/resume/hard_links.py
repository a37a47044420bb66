"""Restores files that a script has written to their content at a checkpoint.

A hard link preserves the content of each closed file, so it survives a rewrite; nothing is copied. Bytes
appended after the checkpoint are cut off.
"""

from __future__ import annotations

import os
import shutil
import stat
import zlib
from collections.abc import Iterable
from pathlib import Path

MOST = 4096  # files
END_BYTES = 1 << 12
SAVES = 3  # checkpoints to resume from: the last ones


class HardLinks:
    """``folder``: holds the hard links, on the disk of the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, str] = {}  # path -> name of the hard link to its content at the last checkpoint
        self._of_saves: list[set[str]] = []

    def keep(self, paths: Iterable[str]) -> None:
        """Link the present content of these files. Links that only older checkpoints need are removed."""
        self.names = {}
        for path in paths:
            if len(self.names) >= MOST:
                break
            try:
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode):
                    name = self.folder / f"{found.st_ino}-{found.st_mtime_ns}"
                    if not name.exists():
                        self.folder.mkdir(parents=True, exist_ok=True)
                        os.link(path, name)
                    self.names[path] = name.name
            except OSError:
                continue  # on another disk, or deleted
        self._of_saves = [set(self.names.values()), *self._of_saves[: SAVES - 1]]
        wanted = set().union(*self._of_saves)
        for name in self.folder.glob("*"):
            if name.name not in wanted:
                name.unlink(missing_ok=True)

    def goes_on(self, names: dict[str, str]) -> None:
        """Continue from a checkpoint with these links. Links of earlier checkpoints stay for a while, too."""
        self.names = dict(names)
        self._of_saves = [set(names.values()), {name.name for name in self.folder.glob("*")}]

    def stands_again(
        self, path: str, name: str | None, mode: str, was_open: bool, end: int, *stood: int
    ) -> bool:
        """Restore a file to its state at a checkpoint; return whether this was possible.

        ``name``: the hard link to its content. ``end``: the value of `end_of` at the checkpoint.
        """
        if how_it_stands(path) == [*stood]:
            return True
        if name is not None:
            self._comes_back(path, name)
        if how_it_stands(path) == [*stood]:
            return True
        size = stood[0]
        if (
            not (was_open or "a" in mode)
            or not how_it_stands(path)[0] >= size >= 0
            or end_of(path, size) != end
        ):
            return False
        os.truncate(path, size)  # its old content is the start of its new content
        return True

    def _comes_back(self, path: str, name: str) -> None:
        """Put the old content back in place of a rewritten file; if the link is gone, change nothing."""
        try:
            copy = Path(f"{path}.coming")
            os.link(self.folder / name, copy)
            os.replace(copy, path)
            copy.unlink(missing_ok=True)  # left over if both were the same file already
        except OSError:
            pass

    def ended(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def how_it_stands(path: str) -> list[int]:
    """Size in bytes and modification time in ns; -1 for a missing file."""
    try:
        found = os.stat(path)
    except OSError:
        return [-1, -1]
    return [found.st_size, found.st_mtime_ns]


def end_of(path: str, size: int | None = None) -> int:
    """Return a digest of the last bytes of a file, or of its first ``size`` bytes."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            file.seek(max(0, size - END_BYTES))
            return zlib.crc32(file.read(min(size, END_BYTES)))
    except OSError:
        return 0


def put_aside(path: str, folder: Path) -> None:
    """Move away what was made after the checkpoint; remove a folder only if it is empty."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        elif os.path.lexists(path):
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(path, folder / f"{len(os.listdir(folder))}-{os.path.basename(path)}")
    except OSError:
        pass  # keep what cannot be moved
