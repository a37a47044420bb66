"""Keeps every change of files that a program makes in a folder of its own (agent/overlay.py).

``CALLS`` names the functions with which Python changes, lists and inspects files, and ``LIBRARIES`` those of
libraries whose C code opens files itself. Each gets the real path from the overlay. Python raises an audit event for
each change, so one that would change the user's files all the same ends the program before it happens. What other
programs change, and C code that is not named here, is found after a trial (trial/leaks.py).
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import posix
import stat
import sys
from functools import partial, wraps
from importlib import machinery

from flatout.agent.bootstrap import AfterImport
from flatout.agent.ledger import Ledger
from flatout.agent.overlay import Overlay, is_folder, mode_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import ModuleType
    from typing import Any

FILES = "FLATOUT_FILES"  # names the folder for what the processes of a trial change
ESCAPED = "escaped"  # in the folder of the overlay: what would have changed the user's files
NAMELESS = getattr(os, "O_TMPFILE", -1)  # a file without a name leaves nothing behind
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# method of FileSandbox -> functions of `os`
CALLS = {
    "_reads": ("stat", "statvfs", "pathconf", "getxattr", "listxattr", "execv", "execve"),
    "_may": ("access",),
    "_reads_link": ("lstat", "readlink"),
    "_enters": ("chdir", "fchdir"),
    "_tells_folder": ("getcwd", "getcwdb"),
    "_lists": ("listdir",),
    "_scans": ("scandir",),
    "_opens": ("open",),
    "_makes": ("mkdir", "mkfifo", "mknod"),
    "_changes": ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr", "fchmod", "fchown"),
    "_changes_link": ("lchown",),
    "_removes": ("unlink", "remove", "rmdir"),
    "_moves": ("rename", "replace"),
    "_links": ("link",),
    "_links_to": ("symlink",),
}
# module -> function, position and name of the path, flags with which its C code opens a file
NEW = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
LIBRARIES = {
    "torch": (("save", 1, "f", NEW), ("load", 0, "f", 0)),
    "torch.jit": (("save", 1, "f", NEW), ("load", 0, "f", 0)),
    "safetensors": (("safe_open", 0, "filename", 0),),
    "safetensors.torch": (("save_file", 1, "filename", NEW), ("load_file", 0, "filename", 0)),
    "safetensors.numpy": (("save_file", 1, "filename", NEW), ("load_file", 0, "filename", 0)),
    "sqlite3": (("connect", 0, "database", os.O_CREAT | os.O_RDWR),),
    "subprocess": (("Popen.__init__", 10, "cwd", 0),),
}
# audit event -> positions of a path and of the open folder it is relative to
EVENTS = {
    "open": ((0, None),),
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
    "sqlite3.connect": ((0, None),),
}


_trial: list[Overlay] = []  # of this process, if it belongs to a trial


def enter(folder: str) -> None:
    """Keep what this process changes in ``folder``, together with the other processes of its trial."""
    if "FLATOUT_DATA_PARALLEL" in os.environ and os.environ.get("RANK", "0") != "0":
        folder += ".rank" + os.environ["RANK"]  # the program is written for one process
    overlay = Overlay(folder, (os.path.dirname(os.path.dirname(folder)),))
    overlay.begin()
    sandbox = FileSandbox(overlay, Ledger())
    sandbox.install()
    sandbox.keep_byte_code()
    sys.addaudithook(sandbox.audit)
    _trial.append(overlay)


def overlay_of_process() -> Overlay:
    return _trial[0]


class FileSandbox:
    def __init__(self, overlay: Overlay, ledger: Ledger) -> None:
        self.overlay = overlay
        self.ledger = ledger

    def install(self) -> None:
        for method, names in CALLS.items():
            for name in names:
                if hasattr(os, name):
                    self._wrap(os, name, getattr(self, method))
        self._wrap(builtins, "open", self._opens_file)
        self.ledger.set(io, "open", builtins.open)
        self._wrap(io, "open_code", self._reads)
        if sys.version_info < (3, 11):
            self._install_pathlib()
        libraries: dict[str, Callable[[ModuleType], None]]
        libraries = {name: partial(self._install_library, rows) for name, rows in LIBRARIES.items()}
        for name in set(libraries) & set(sys.modules):
            libraries.pop(name)(sys.modules[name])
        for finder in (AfterImport(libraries), Modules(self.overlay)):
            sys.meta_path.insert(0 if isinstance(finder, AfterImport) else len(sys.meta_path), finder)
            self.ledger.call("sys.meta_path", partial(_leave, finder))

    def _install_library(self, rows: Iterable[tuple[str, int, str, int]], module: ModuleType) -> None:
        for name, at, keyword, flags in rows:
            owner: Any = module
            *classes, function = name.split(".")
            for each in classes:
                owner = getattr(owner, each)
            self._wrap(owner, function, partial(self._opens_below, at, keyword, flags))

    def _install_pathlib(self) -> None:
        """Replace the references that pathlib keeps in Python 3.10."""
        import pathlib

        accessor = vars(pathlib)["_NormalAccessor"]
        for name in ("open", *(name for names in CALLS.values() for name in names)):
            if name in vars(accessor):
                self.ledger.set(accessor, name, staticmethod(getattr(io if name == "open" else os, name)))

    def _wrap(self, owner: object, name: str, does: Callable[..., Any]) -> None:
        really, own = getattr(owner, name), self.overlay.own

        @wraps(really)
        def sandboxed(*args: Any, **kwargs: Any) -> Any:
            if getattr(own, "busy", False):
                return really(*args, **kwargs)
            own.answering, before = True, getattr(own, "answering", False)
            try:
                return does(really, *args, **kwargs)
            except OSError as error:  # the program knows its own paths, not the real ones
                error.filename, error.filename2 = (
                    path if known is not None else None
                    for known, path in zip(
                        (error.filename, error.filename2), (*args, None, None), strict=False
                    )
                )
                raise
            finally:
                own.answering = before

        self.ledger.set(owner, name, sandboxed)
        # libraries look these functions up to learn what they accept
        for group in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids"):
            members = getattr(os, group)
            if really in members:
                members.add(sandboxed)
                self.ledger.call(f"os.{group}", partial(members.discard, sandboxed))

    # -- reading ----------------------------------------------------------------------------------------------------

    def _reads(self, really: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        return really(
            self.overlay.reading(path, kwargs.get("follow_symlinks", True), dir_fd), *args, **kwargs
        )

    def _may(self, *args: Any, **kwargs: Any) -> bool:
        try:
            return bool(self._reads(*args, **kwargs))
        except OSError:
            return False

    def _reads_link(self, really: Any, path: Any, *args: Any, dir_fd: int | None = None) -> Any:
        return really(self.overlay.reading(path, False, dir_fd), *args)

    def _enters(self, really: Any, path: Any) -> None:
        if not self.overlay.changed():
            really(path)
            return
        key, place = self.overlay.find(self.overlay.path_of(path) if isinstance(path, int) else path)
        below = self.overlay.below(key)
        posix.chdir(below if below is not None and is_folder(below) else place)

    def _tells_folder(self, really: Any) -> Any:
        folder = self.overlay.cwd()
        return os.fsencode(folder) if really.__name__ == "getcwdb" else folder

    def _lists(self, really: Any, path: Any = None) -> list[Any]:
        if not self.overlay.changed():
            return really(path)
        key, place = self._folder(path)
        names = self.overlay.names(key) if is_folder(place) else really(place)
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    def _scans(self, really: Any, path: Any = None) -> Any:
        if not self.overlay.changed():
            return really(path)
        key, place = self._folder(path)
        if not is_folder(place):
            return really(place)
        text: Any = "." if path is None else "" if isinstance(path, int) else os.fspath(path)
        return Entries(key, text, self.overlay.names(key))

    def _folder(self, path: Any) -> tuple[str, str]:
        return self.overlay.find(
            self.overlay.path_of(path) if isinstance(path, int) else "." if path is None else path
        )

    # -- opening ----------------------------------------------------------------------------------------------------

    def _opens(
        self, really: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if flags & WRITES and flags & NAMELESS != NAMELESS:
            return posix.open(self.overlay.writing(path, flags, dir_fd), flags, mode)
        return posix.open(self.overlay.reading(path, not flags & os.O_NOFOLLOW, dir_fd), flags, mode)

    def _opens_file(self, really: Any, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """Open with an opener, so that the file keeps the name that the program gave."""
        is_path = isinstance(file, (str, bytes, os.PathLike)) and isinstance(mode, str)
        writes = is_path and set(mode) & set("wax+")
        if is_path and len(args) < 6 and not kwargs.get("opener") and (writes or self.overlay.changed()):
            kwargs["opener"] = lambda path, flags: self._opens(None, path, flags, 0o666)
        return really(file, mode, *args, **kwargs)

    def _opens_below(self, at: int, keyword: str, flags: int, really: Any, *args: Any, **kwargs: Any) -> Any:
        path = args[at] if len(args) > at else kwargs.get(keyword)
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if text and not text.startswith((":", "file:")):  # a database in memory, or a URI
            real = self.overlay.writing(path, flags) if flags else self.overlay.reading(path)
            if len(args) > at:
                args = (*args[:at], real, *args[at + 1 :])
            else:
                kwargs[keyword] = real
        return really(*args, **kwargs)

    # -- changing ---------------------------------------------------------------------------------------------------

    def _new(self, path: Any, dir_fd: int | None) -> str:
        """Return the real path at which an entry is made; if there is one already, its own, where that fails."""
        key, place = self.overlay.find(path, False, dir_fd)
        return place if mode_of(place) or self.overlay.leaves_alone(key) else self.overlay.fresh(key)

    def _makes(self, really: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        really(self._new(path, dir_fd), *args, **kwargs)
        self.overlay.note()

    def _changes(self, really: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        overlay, handle = self.overlay, path
        if isinstance(handle, int):
            path = overlay.path_of(handle)
        key, place = overlay.find(path, kwargs.get("follow_symlinks", True), dir_fd)
        if not key or not mode_of(place) or overlay.leaves_alone(key):
            really(handle if isinstance(handle, int) else place, *args, **kwargs)
            return
        owner = posix.lstat(place).st_uid
        if posix.geteuid() not in (0, owner) and not posix.access(place, os.W_OK):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        overlay.copy_up(key)
        by_path = {"fchmod": posix.chmod, "fchown": posix.chown}.get(really.__name__, really)
        by_path(overlay.upper + key, *args, **kwargs)

    def _changes_link(self, really: Any, path: Any, *args: Any) -> None:
        self._changes(posix.chown, path, *args, follow_symlinks=False)

    def _removes(self, really: Any, path: Any, *, dir_fd: int | None = None) -> None:
        key, place = self.overlay.find(path, False, dir_fd)
        mode = mode_of(place)
        if not mode or stat.S_ISDIR(mode) != (really.__name__ == "rmdir") or self.overlay.leaves_alone(key):
            really(place)
            return
        why = errno.ENOTEMPTY if stat.S_ISDIR(mode) and self.overlay.names(key) else 0
        if why := errno.EINVAL if _last(path) == "." else why:
            raise OSError(why, os.strerror(why), path)
        self.overlay.remove(key)

    def _moves(
        self,
        really: Any,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        overlay = self.overlay
        source, place = overlay.find(src, False, src_dir_fd)
        if not is_folder(overlay.place(source.rpartition("/")[0])):
            really(place, place)
        target, goes = overlay.find(dst, False, dst_dir_fd)
        stays = [overlay.leaves_alone(source), overlay.leaves_alone(target)]
        mode, there = mode_of(place), mode_of(goes)
        nowhere = not is_folder(overlay.place(target.rpartition("/")[0]))
        dots = not nowhere and {_last(src), _last(dst)} & {".", ".."}
        if not dots and (not mode or all(stays) or nowhere):
            really(place, goes)
            return
        if why := errno.EBUSY if dots else self._why_not_moved(source, target, mode, there, any(stays)):
            raise OSError(why, os.strerror(why), src, None, dst)
        if there and os.path.samestat(posix.lstat(place), posix.lstat(goes)):
            return  # two names of one file
        if not stays[1]:
            goes = overlay.fresh(target)
            if there:
                overlay.remove(target)
        if not any(stays):
            overlay.move(source, target)
            return
        import shutil

        with overlay.looking():
            (shutil.move if stays[0] else partial(shutil.copy2, follow_symlinks=False))(place, goes)
        overlay.note() if stays[0] else overlay.remove(source)

    def _why_not_moved(self, source: str, target: str, mode: int, there: int, across: bool) -> int:
        if source == target:
            return 0
        if stat.S_ISDIR(mode) and target.startswith(f"{source}/"):
            return errno.EINVAL
        if source.startswith(f"{target}/"):
            return errno.ENOTEMPTY
        if there and stat.S_ISDIR(mode) != stat.S_ISDIR(there):
            return errno.EISDIR if stat.S_ISDIR(there) else errno.ENOTDIR
        if there and stat.S_ISDIR(there) and self.overlay.names(target):
            return errno.ENOTEMPTY
        # shutil.move then goes on file by file
        return errno.EXDEV if across and stat.S_ISDIR(mode) else 0

    def _links(
        self,
        really: Any,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **kwargs: Any,
    ) -> None:
        source, place = self.overlay.find(src, False, src_dir_fd)
        if not mode_of(place):
            really(place, place, **kwargs)
        goes = self._new(dst, dst_dir_fd)
        if not is_folder(place) and not mode_of(goes) and not self.overlay.leaves_alone(source):
            self.overlay.copy_up(source)
            place = self.overlay.place(source)
        really(place, goes, **kwargs)
        self.overlay.note()

    def _links_to(self, really: Any, src: Any, dst: Any, *args: Any, dir_fd: int | None = None) -> None:
        really(src, self._new(dst, dir_fd), *args)
        self.overlay.note()

    # -- the byte code and the audit of a trial ---------------------------------------------------------------------------------------

    def keep_byte_code(self) -> None:
        """Write byte code only for installed packages, as a plain run of the program would."""
        python = "/python{}.{}/".format(*sys.version_info)

        def caches(really: Any, loader: object, path: str, *args: Any, **kwargs: Any) -> None:
            if any(part in path for part in ("/site-packages/", "/dist-packages/", python)):
                really(loader, path, *args, **kwargs)

        self._wrap(machinery.SourceFileLoader, "set_data", caches)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """End the program before a change that did not come through this sandbox."""
        paths = EVENTS.get(event)
        own = self.overlay.own
        if paths is None or self.overlay.busy or getattr(own, "answering", False):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & WRITES):
            return
        for at, folder in paths:
            path, fd = args[at], -1 if folder is None else args[folder]
            if isinstance(path, (str, bytes, os.PathLike)) and os.fspath(path) not in ("", b"", ":memory:"):
                own.answering = True
                try:
                    key, place = self.overlay.find(path, True, fd if fd >= 0 else None)
                finally:
                    own.answering = False
                special = mode_of(place) and not stat.S_ISREG(mode_of(place)) and not is_folder(place)
                if not special and not self.overlay.leaves_alone(key):
                    self._stop(event, os.fsdecode(path))

    def _stop(self, event: str, path: str) -> None:
        frame: Any = sys._getframe(2)
        with self.overlay.looking():
            os.makedirs(self.overlay.folder, exist_ok=True)
            with open(f"{self.overlay.folder}/{ESCAPED}", "w", encoding="utf-8", errors="replace") as file:
                file.write(f"{event} of {path} at {frame.f_code.co_filename}:{frame.f_lineno}")
        os._exit(1)


class Modules:
    """Finds modules that the program has written itself."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if self.overlay.busy or not self.overlay.changed():
            return None
        keys = [self.overlay.key(folder or ".", True) for folder in (sys.path if path is None else path)]
        above = [self.overlay.upper + key for key in keys if self.overlay.holds(key)]
        return machinery.PathFinder.find_spec(name, above) if above else None


class Entries:
    """What ``os.scandir`` returns for a folder of the view."""

    def __init__(self, key: str, path: Any, names: list[str]) -> None:
        self._entries = (Entry(key, path, name) for name in names)

    def __iter__(self) -> Entries:
        return self

    def __next__(self) -> Entry:
        return next(self._entries)

    def __enter__(self) -> Entries:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()


class Entry:
    """An ``os.DirEntry`` of the view."""

    def __init__(self, key: str, path: Any, name: str) -> None:
        self._path = f"{key}/{name}"
        self.name: Any = os.fsencode(name) if isinstance(path, bytes) else name
        self.path = os.path.join(path, self.name)

    def __fspath__(self) -> Any:
        return self.path

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        try:
            return os.stat(self._path, follow_symlinks=follow_symlinks)
        except OSError as error:
            error.filename = self.path
            raise

    def _is(self, of_kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return of_kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
        except FileNotFoundError:
            return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_ISREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_ISLNK, False)

    def is_junction(self) -> bool:
        return False

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino


def _last(path: Any) -> str:
    """Return the last name of a path as it is written."""
    return os.fsdecode(path).rstrip("/").rpartition("/")[2]


def _leave(finder: object) -> None:
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
