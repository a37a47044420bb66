"""Files that a program has written, as they were at a save.

What is closed gets another name, so that what is in it comes back after it was written anew; nothing is copied. What was only added to since is cut off.
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
SAVES = 3  # so many of the last ones can be gone on from


class Kept:
    """``folder``: where the other names lie, on the disk of the files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, str] = {}  # path -> another name for what was in it at the last save
        self._of_saves: list[set[str]] = []

    def keep(self, paths: Iterable[str]) -> None:
        """Give what is in these now another name. What only older saves need has none from here on."""
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
                continue  # another disk, or gone
        self._of_saves = [set(self.names.values()), *self._of_saves[:SAVES - 1]]
        wanted = set().union(*self._of_saves)
        for name in self.folder.glob("*"):
            if name.name not in wanted:
                name.unlink(missing_ok=True)

    def goes_on(self, names: dict[str, str]) -> None:
        """From a save that had these. Those of saves before it stay for a while, too."""
        self.names = dict(names)
        self._of_saves = [set(names.values()), {name.name for name in self.folder.glob("*")}]

    def stands_again(self, path: str, name: str | None, mode: str, was_open: bool, end: int, *stood: int) -> bool:
        """Bring a file back to how it stood at a save; whether that could be done. ``name``: what was in it has this one, too. ``end``: `end_of` it then."""
        if how_it_stands(path) == [*stood]:
            return True
        if name is not None:
            self._comes_back(path, name)
        if how_it_stands(path) == [*stood]:
            return True
        size = stood[0]
        if not (was_open or "a" in mode) or not how_it_stands(path)[0] >= size >= 0 or end_of(path, size) != end:
            return False
        os.truncate(path, size)  # what was in it then is its beginning now, so that is all of it
        return True

    def _comes_back(self, path: str, name: str) -> None:
        """In the place of what has been written anew since; where the other name is there no more, all stays."""
        try:
            copy = Path(f"{path}.coming")
            os.link(self.folder / name, copy)
            os.replace(copy, path)
            copy.unlink(missing_ok=True)  # where both were one file already
        except OSError:
            pass

    def ended(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def how_it_stands(path: str) -> list[int]:
    """Length in bytes and time in ns; -1 where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return [-1, -1]
    return [found.st_size, found.st_mtime_ns]


def end_of(path: str, size: int | None = None) -> int:
    """Digest of the last bytes of a file, or of what were its last ones when it had ``size``."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            file.seek(max(0, size - END_BYTES))
            return zlib.crc32(file.read(min(size, END_BYTES)))
    except OSError:
        return 0


def put_aside(path: str, folder: Path) -> None:
    """What was made after the save; a folder only where it is empty."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            os.rmdir(path)
        elif os.path.lexists(path):
            folder.mkdir(parents=True, exist_ok=True)
            os.replace(path, folder / f"{len(os.listdir(folder))}-{os.path.basename(path)}")
    except OSError:
        pass  # what cannot be moved stays
