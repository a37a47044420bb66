"""Maps file paths of a trial: a view over the user's folders, with the script's own changes.

This module patches nothing; the file sandbox asks it about every path. Three kinds of objects belong to the
script. Files it wrote are in ``moved`` and lie in the trial's folder. The others are folders it made, and
files it created under a fresh name (temporary files, which lie where the script put them). Both are also
listed in a file, so that the parent can remove what a killed script left.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SYSTEM = ("/dev/", "/proc/", "/sys/")
# other processes of a compiler read them back
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")


class Overlay:
    def __init__(self, folder: str, keeps_temporary: bool = False) -> None:
        """``keeps_temporary``: also redirect files with a fixed name in the folder for temporary files."""
        self.folder = folder
        self.moved: dict[str, str | None] = {}  # None: removed by the script, but still on the disk
        self.made: list[str] = []  # folders
        self.fresh: set[str] = set()
        self.list = f"{folder}.list"
        self._names: set[str] = set()
        self._count = itertools.count()
        self._own = threading.local()
        temporary, cwd = _folder(tempfile.gettempdir()), _folder(os.getcwd())
        caches = [os.environ[name] for name in CACHES if os.environ.get(name)] + [
            os.path.expanduser(f"~/{name}") for name in (".cache", ".triton")
        ]
        self._outside = (*SYSTEM, _folder(folder), *(_folder(path) for path in caches))
        self._temporary = "\0" if keeps_temporary else temporary  # no path starts with this
        # users keep projects in /tmp
        self._project = cwd if cwd.startswith(temporary) and cwd != temporary else None

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, the overlay itself asks the file system, so the sandbox must not ask the overlay."""
        before, self._own.busy = self.busy, True
        try:
            yield
        finally:
            self._own.busy = before

    @property
    def busy(self) -> bool:
        return getattr(self._own, "busy", False)

    # -- path names -----------------------------------------------------------------------------------------

    def key(self, path: Any) -> str:
        """Return the canonical name of a file: folders resolved, a final link not."""
        folder, name = os.path.split(os.path.abspath(os.fsdecode(os.fspath(path))))
        with self.looking():
            return os.path.join(os.path.realpath(folder), name)

    def is_outside(self, path: object) -> bool:
        """Whether a path is left alone: not a path, or a system, temporary, cache or trial path."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return True
        key = self.key(path) + os.sep
        if key.startswith(self._outside):
            return True
        return key.startswith(self._temporary) and not (self._project and key.startswith(self._project))

    def _known(self, path: object) -> str | None:
        """Return the key of a path that the script has changed, else None; most need only the name."""
        if not self.moved or not isinstance(path, (str, bytes, os.PathLike)):
            return None
        if os.path.basename(os.fsdecode(os.fspath(path)).rstrip(os.sep)) not in self._names:
            return None
        key = self.key(path)
        return key if key in self.moved else None

    def _note(self, key: str, target: str | None) -> None:
        self.moved[key] = target
        self._names.add(os.path.basename(key))

    def _is_there(self, key: str) -> bool:
        """Whether a file that the script did not write exists from its point of view."""
        with self.looking():
            return key not in self.moved and os.path.lexists(key)

    # -- reading and writing --------------------------------------------------------------------------------

    def reading(self, path: object) -> Any:
        """Return where the content lies. Raises FileNotFoundError for files that the script has removed."""
        key = self._known(path)
        if key is None:
            return path
        target = self.moved[key]
        if target is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return target

    def writing(self, path: object, mode: str) -> Any:
        """Return where to write: the path itself if nothing may move or the script itself must fail."""
        if self.is_outside(path):
            return path
        key = self.key(path)
        with self.looking():
            if key not in self.moved and os.path.islink(key):
                key = os.path.realpath(key)
        target = self.moved.get(key)
        if target is not None or key in self.fresh or self.is_outside(key):
            return target or path
        folder = os.path.dirname(key)
        self.reading(folder)  # raises for a folder that the script has removed
        there = self._is_there(key)
        with self.looking():
            if (
                not os.path.isdir(folder)
                or not os.access(folder, os.W_OK)
                or (there and os.path.isdir(key))
                or ("x" in mode and there)
            ):
                return path
            if not there and not set(mode) & set("wax"):
                self.reading(path)
                return path
            os.makedirs(self.folder, exist_ok=True)
            target = os.path.join(
                self.folder, f"{os.getpid()}-{next(self._count):04d}-{os.path.basename(key)[-200:]}"
            )
            if there and "w" not in mode:
                shutil.copy2(key, target)
        self._note(key, target)
        return target

    def changing(self, path: object) -> Any:
        """Return where to change a file's times, permissions or length; None to ignore the change."""
        if self.is_outside(path):
            return path
        key = self.key(path)
        self.reading(path)
        with self.looking():
            if key in self.made or key in self.fresh:
                return path
            if os.path.isdir(key):
                return None
        return self.writing(path, "r+")

    def create(self, path: object) -> None:
        """Register a new file that was created in place, under a fresh name."""
        self.fresh.add(self.key(path))
        self._list("file", self.key(path))

    # -- folders --------------------------------------------------------------------------------------------

    def shows_again(self, path: object) -> bool:
        """Show a folder again that the script removed and now makes: it was there all the time."""
        key = self._known(path)
        if key is None or self.moved[key] is not None:
            return False
        del self.moved[key]
        return True

    def make(self, path: object) -> None:
        if not self.is_outside(path):
            self.made.append(self.key(path))
            self._list("folder", self.made[-1])

    def hide_folder(self, path: object) -> bool:
        """Remove a folder from view; False if it must really be removed. Raises as ``rmdir`` does."""
        key = self.key(path)
        self.reading(path)
        for known in [
            known
            for known, target in self.moved.items()
            if target is not None and known.startswith(key + os.sep)
        ]:
            del self.moved[known]
        if key in self.made:
            self.made.remove(key)
            return False
        with self.looking():
            if not os.path.isdir(key) or os.path.islink(key):
                return False
            left = [name for name in os.listdir(key) if os.path.join(key, name) not in self.moved]
        if left:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        self._note(key, None)
        return True

    # -- removing and moving --------------------------------------------------------------------------------

    def remove(self, path: object, quiet: bool = False) -> bool:
        """Remove a file from view; False if it must really be removed. Raises as ``unlink`` does."""
        key = self.key(path)
        if key in self.fresh:
            self.fresh.discard(key)
            return False
        if key in self.moved:
            target = self.moved[key]
            if target is None and not quiet:
                self.reading(path)
            with self.looking():
                if target is not None:
                    os.unlink(target)
            self._forget(key)
            return True
        with self.looking():
            if not os.path.lexists(key) or (os.path.isdir(key) and not os.path.islink(key)):
                return False
        self._note(key, None)
        return True

    def _forget(self, key: str) -> None:
        self.moved.pop(key, None)
        with self.looking():
            there = os.path.lexists(key)
        if there:
            self._note(key, None)

    def move(self, source: object, target: Tensor) -> bool:
        """Move a file in view; False if it must really be moved. Raises as ``rename`` does."""
        if self.is_outside(source) and self.is_outside(target):
            return False
        key = self.key(source)
        with self.looking():
            if os.path.isdir(key) and key not in self.moved:
                return self._move_folder(key, source, target)
        lies = self.reading(source)
        ours = lies is not source or key in self.fresh or self.is_outside(source)
        with self.looking():
            if not os.path.lexists(lies):
                return False
        goes = self.writing(target, "w")
        with self.looking():
            if goes is target and (
                os.path.isdir(target) or not os.path.isdir(os.path.dirname(os.path.abspath(target)))
            ):
                return False
            (shutil.move if ours else shutil.copy2)(lies, goes)
        self.fresh.discard(key)
        self._forget(key)
        return True

    def _move_folder(self, key: str, source: object, target: Tensor) -> bool:
        if key not in self.made:  # a user's folder: after this error shutil.move continues file by file
            raise OSError(errno.EXDEV, "a folder that was there before the trial stays where it is", source)
        self.made[self.made.index(key)] = new = self.key(target)
        self._list("folder", new)
        for known in [known for known in self.moved if known.startswith(key + os.sep)]:
            self._note(new + known[len(key) :], self.moved.pop(known))
        return False

    # -- cleanup --------------------------------------------------------------------------------------------

    def _list(self, kind: str, key: str) -> None:
        with self.looking(), open(self.list, "a", encoding="utf-8") as file:
            file.write(json.dumps([kind, key]) + "\n")


def tidy(folder: str) -> None:
    """Remove what a trial made in place: its fresh files, then its empty folders, innermost first."""
    try:
        with open(f"{folder}.list", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError:
        return
    listed = [json.loads(line) for line in lines]
    for kind, path in sorted(listed, key=lambda entry: (entry[0] == "folder", -len(entry[1]))):
        try:
            (os.rmdir if kind == "folder" else os.unlink)(path)
        except OSError:
            pass


def _folder(path: str) -> str:
    return os.path.join(os.path.realpath(path), "")
