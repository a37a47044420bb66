"""Keeps every change of files that a program makes in a folder of its own (agent/overlay.py).

``OS_CALLS`` names the functions with which Python changes, lists and inspects files, and ``LIBRARY_CALLS`` those of
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

FILES_VARIABLE = "FLATOUT_FILES"  # names the folder for what the processes of a trial change
ESCAPED = "escaped"  # in the folder of the overlay: what would have changed the user's files
O_TMPFILE = getattr(os, "O_TMPFILE", -1)  # a file without a name leaves nothing behind
WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# method of FileSandbox -> functions of `os`
OS_CALLS = {
    "_read": ("stat", "statvfs", "pathconf", "getxattr", "listxattr", "execv", "execve"),
    "_access": ("access",),
    "_read_link": ("lstat", "readlink"),
    "_chdir": ("chdir", "fchdir"),
    "_getcwd": ("getcwd", "getcwdb"),
    "_listdir": ("listdir",),
    "_scandir": ("scandir",),
    "_open": ("open",),
    "_create": ("mkdir", "mkfifo", "mknod"),
    "_chattr": ("chmod", "chown", "utime", "truncate", "setxattr", "removexattr", "fchmod", "fchown"),
    "_change_link": ("lchown",),
    "_remove": ("unlink", "remove", "rmdir"),
    "_rename": ("rename", "replace"),
    "_link": ("link",),
    "_symlink": ("symlink",),
}
# module -> function, position and name of the path, flags with which its C code opens a file
CREATE_FLAGS = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
LIBRARY_CALLS = {
    "torch": (("save", 1, "f", CREATE_FLAGS), ("load", 0, "f", 0)),
    "torch.jit": (("save", 1, "f", CREATE_FLAGS), ("load", 0, "f", 0)),
    "safetensors": (("safe_open", 0, "filename", 0),),
    "safetensors.torch": (("save_file", 1, "filename", CREATE_FLAGS), ("load_file", 0, "filename", 0)),
    "safetensors.numpy": (("save_file", 1, "filename", CREATE_FLAGS), ("load_file", 0, "filename", 0)),
    "pyarrow": (("memory_map", 0, "path", 0),),
    "sqlite3": (("connect", 0, "database", os.O_CREAT | os.O_RDWR),),
    "subprocess": (("Popen.__init__", 10, "cwd", 0),),
}
# audit event -> positions of a path and of the open folder it is relative to
AUDIT_EVENTS = {
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


_process_overlays: list[Overlay] = []  # of this process, if it belongs to a trial


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
    _process_overlays.append(overlay)


def overlay_of_process() -> Overlay:
    return _process_overlays[0]


class FileSandbox:
    def __init__(self, overlay: Overlay, ledger: Ledger) -> None:
        self.overlay = overlay
        self.ledger = ledger

    def install(self) -> None:
        for method, names in OS_CALLS.items():
            for name in names:
                if hasattr(os, name):
                    self._wrap(os, name, getattr(self, method))
        self._wrap(builtins, "open", self._open_file)
        self.ledger.set(io, "open", builtins.open)
        self._wrap(io, "open_code", self._read)
        if sys.version_info < (3, 11):
            self._install_pathlib()
        libraries: dict[str, Callable[[ModuleType], None]]
        libraries = {name: partial(self._install_library, rows) for name, rows in LIBRARY_CALLS.items()}
        for name in set(libraries) & set(sys.modules):
            libraries.pop(name)(sys.modules[name])
        for finder in (AfterImport(libraries), ModuleFinder(self.overlay)):
            sys.meta_path.insert(0 if isinstance(finder, AfterImport) else len(sys.meta_path), finder)
            self.ledger.on_restore("sys.meta_path", partial(_remove_finder, finder))

    def _install_library(self, rows: Iterable[tuple[str, int, str, int]], module: ModuleType) -> None:
        for name, position, keyword, flags in rows:
            owner: Any = module
            *classes, function = name.split(".")
            for name_of_class in classes:
                owner = getattr(owner, name_of_class)
            self._wrap(owner, function, partial(self._open_in_library, position, keyword, flags))

    def _install_pathlib(self) -> None:
        import pathlib

        accessor = vars(pathlib)["_NormalAccessor"]
        for name in ("open", *(name for names in OS_CALLS.values() for name in names)):
            if name in vars(accessor):
                self.ledger.set(accessor, name, staticmethod(getattr(io if name == "open" else os, name)))

    def _wrap(self, owner: object, name: str, replacement: Callable[..., Any]) -> None:
        original, local = getattr(owner, name), self.overlay.local

        @wraps(original)
        def sandboxed(*args: Any, **kwargs: Any) -> Any:
            if getattr(local, "bypassed", False):
                return original(*args, **kwargs)
            local.in_sandbox, was_in_sandbox = True, getattr(local, "in_sandbox", False)
            try:
                return replacement(original, *args, **kwargs)
            except OSError as error:  # the program knows its own paths, not the real ones
                error.filename, error.filename2 = (
                    path if given is not None else None
                    for given, path in zip(
                        (error.filename, error.filename2), (*args, None, None), strict=False
                    )
                )
                raise
            finally:
                local.in_sandbox = was_in_sandbox

        self.ledger.set(owner, name, sandboxed)
        # libraries look these functions up to learn what they accept
        for group in ("supports_dir_fd", "supports_fd", "supports_follow_symlinks", "supports_effective_ids"):
            members = getattr(os, group)
            if original in members:
                members.add(sandboxed)
                self.ledger.on_restore(f"os.{group}", partial(members.discard, sandboxed))

    # -- reading

    def _read(self, original: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> Any:
        return original(
            self.overlay.path_to_read(path, kwargs.get("follow_symlinks", True), dir_fd), *args, **kwargs
        )

    def _access(self, *args: Any, **kwargs: Any) -> bool:
        try:
            return bool(self._read(*args, **kwargs))
        except OSError:
            return False

    def _read_link(self, original: Any, path: Any, *args: Any, dir_fd: int | None = None) -> Any:
        return original(self.overlay.path_to_read(path, False, dir_fd), *args)

    def _chdir(self, original: Any, path: Any) -> None:
        if not self.overlay.has_changes():
            original(path)
            return
        key, real = self.overlay.find(self.overlay.path_of(path) if isinstance(path, int) else path)
        lower = self.overlay.lower(key)
        posix.chdir(lower if lower is not None and is_folder(lower) else real)

    def _getcwd(self, original: Any) -> Any:
        folder = self.overlay.cwd()
        return os.fsencode(folder) if original.__name__ == "getcwdb" else folder

    def _listdir(self, original: Any, path: Any = None) -> list[Any]:
        if not self.overlay.has_changes():
            return original(path)
        key, real = self._folder(path)
        names = self.overlay.names(key) if is_folder(real) else original(real)
        return list(map(os.fsencode, names)) if isinstance(path, bytes) else names

    def _scandir(self, original: Any, path: Any = None) -> Any:
        if not self.overlay.has_changes():
            return original(path)
        key, real = self._folder(path)
        if not is_folder(real):
            return original(real)
        text: Any = "." if path is None else "" if isinstance(path, int) else os.fspath(path)
        return ScandirIterator(key, text, self.overlay.names(key))

    def _folder(self, path: Any) -> tuple[str, str]:
        return self.overlay.find(
            self.overlay.path_of(path) if isinstance(path, int) else "." if path is None else path
        )

    # -- opening

    def _open(
        self, original: Any, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None
    ) -> int:
        if flags & WRITE_FLAGS and flags & O_TMPFILE != O_TMPFILE:
            return posix.open(self.overlay.path_to_write(path, flags, dir_fd), flags, mode)
        return posix.open(self.overlay.path_to_read(path, not flags & os.O_NOFOLLOW, dir_fd), flags, mode)

    def _open_file(self, original: Any, file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
        """Open with an opener, so that the file keeps the name that the program gave."""
        is_path = isinstance(file, (str, bytes, os.PathLike)) and isinstance(mode, str)
        writes = is_path and set(mode) & set("wax+")
        if is_path and len(args) < 6 and not kwargs.get("opener") and (writes or self.overlay.has_changes()):
            kwargs["opener"] = lambda path, flags: self._open(None, path, flags, 0o666)
        return original(file, mode, *args, **kwargs)

    def _open_in_library(
        self, position: int, keyword: str, flags: int, original: Any, *args: Any, **kwargs: Any
    ) -> Any:
        path = args[position] if len(args) > position else kwargs.get(keyword)
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if text and not text.startswith((":", "file:")):  # a database in memory, or a URI
            real = self.overlay.path_to_write(path, flags) if flags else self.overlay.path_to_read(path)
            if len(args) > position:
                args = (*args[:position], real, *args[position + 1 :])
            else:
                kwargs[keyword] = real
        return original(*args, **kwargs)

    # -- changing

    def _path_for_new(self, path: Any, dir_fd: int | None) -> str:
        """Return the real path at which an entry is made; if there is one already, its own, where that fails."""
        key, real = self.overlay.find(path, False, dir_fd)
        return real if mode_of(real) or self.overlay.excludes(key) else self.overlay.new_path(key)

    def _create(self, original: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        original(self._path_for_new(path, dir_fd), *args, **kwargs)
        self.overlay.record()

    def _chattr(self, original: Any, path: Any, *args: Any, dir_fd: int | None = None, **kwargs: Any) -> None:
        overlay, handle = self.overlay, path
        if isinstance(handle, int):
            path = overlay.path_of(handle)
        key, real = overlay.find(path, kwargs.get("follow_symlinks", True), dir_fd)
        if not key or not mode_of(real) or overlay.excludes(key):
            original(handle if isinstance(handle, int) else real, *args, **kwargs)
            return
        owner = posix.lstat(real).st_uid
        if posix.geteuid() not in (0, owner) and not posix.access(real, os.W_OK):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM), path)
        overlay.copy_up(key)
        by_path = {"fchmod": posix.chmod, "fchown": posix.chown}.get(original.__name__, original)
        by_path(overlay.upper + key, *args, **kwargs)

    def _change_link(self, original: Any, path: Any, *args: Any) -> None:
        self._chattr(posix.chown, path, *args, follow_symlinks=False)

    def _remove(self, original: Any, path: Any, *, dir_fd: int | None = None) -> None:
        key, real = self.overlay.find(path, False, dir_fd)
        mode = mode_of(real)
        if not mode or stat.S_ISDIR(mode) != (original.__name__ == "rmdir") or self.overlay.excludes(key):
            original(real)
            return
        why = errno.ENOTEMPTY if stat.S_ISDIR(mode) and self.overlay.names(key) else 0
        if why := errno.EINVAL if _last_name(path) == "." else why:
            raise OSError(why, os.strerror(why), path)
        self.overlay.remove(key)

    def _rename(
        self,
        original: Any,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> None:
        overlay = self.overlay
        source, real = overlay.find(src, False, src_dir_fd)
        if not is_folder(overlay.real_path(source.rpartition("/")[0])):
            original(real, real)
        target, target_real = overlay.find(dst, False, dst_dir_fd)
        excluded = [overlay.excludes(source), overlay.excludes(target)]
        mode, target_mode = mode_of(real), mode_of(target_real)
        no_parent = not is_folder(overlay.real_path(target.rpartition("/")[0]))
        dots = not no_parent and {_last_name(src), _last_name(dst)} & {".", ".."}
        if not dots and (not mode or all(excluded) or no_parent):
            original(real, target_real)
            return
        across = any(excluded)
        if why := errno.EBUSY if dots else self._rename_errno(source, target, mode, target_mode, across):
            raise OSError(why, os.strerror(why), src, None, dst)
        if target_mode and os.path.samestat(posix.lstat(real), posix.lstat(target_real)):
            return  # two names of one file
        if not excluded[1]:
            target_real = overlay.new_path(target)
            if target_mode:
                overlay.remove(target)
        if not any(excluded):
            overlay.move(source, target)
            return
        import shutil

        with overlay.bypass():
            (shutil.move if excluded[0] else partial(shutil.copy2, follow_symlinks=False))(real, target_real)
        overlay.record() if excluded[0] else overlay.remove(source)

    def _rename_errno(self, source: str, target: str, mode: int, target_mode: int, crosses: bool) -> int:
        if source == target:
            return 0
        if stat.S_ISDIR(mode) and target.startswith(f"{source}/"):
            return errno.EINVAL
        if source.startswith(f"{target}/"):
            return errno.ENOTEMPTY
        if target_mode and stat.S_ISDIR(mode) != stat.S_ISDIR(target_mode):
            return errno.EISDIR if stat.S_ISDIR(target_mode) else errno.ENOTDIR
        if target_mode and stat.S_ISDIR(target_mode) and self.overlay.names(target):
            return errno.ENOTEMPTY
        # shutil.move then goes on file by file
        return errno.EXDEV if crosses and stat.S_ISDIR(mode) else 0

    def _link(
        self,
        original: Any,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **kwargs: Any,
    ) -> None:
        source, real = self.overlay.find(src, False, src_dir_fd)
        if not mode_of(real):
            original(real, real, **kwargs)
        target_real = self._path_for_new(dst, dst_dir_fd)
        if not is_folder(real) and not mode_of(target_real) and not self.overlay.excludes(source):
            self.overlay.copy_up(source)
            real = self.overlay.real_path(source)
        original(real, target_real, **kwargs)
        self.overlay.record()

    def _symlink(self, original: Any, src: Any, dst: Any, *args: Any, dir_fd: int | None = None) -> None:
        original(src, self._path_for_new(dst, dir_fd), *args)
        self.overlay.record()

    # -- the byte code and the audit of a trial

    def keep_byte_code(self) -> None:
        """Write byte code only for installed packages, as a plain run of the program would."""
        python = "/python{}.{}/".format(*sys.version_info)

        def set_data(original: Any, loader: object, path: str, *args: Any, **kwargs: Any) -> None:
            if any(part in path for part in ("/site-packages/", "/dist-packages/", python)):
                original(loader, path, *args, **kwargs)

        self._wrap(machinery.SourceFileLoader, "set_data", set_data)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """End the program before a change that did not come through this sandbox."""
        paths = AUDIT_EVENTS.get(event)
        local = self.overlay.local
        if paths is None or self.overlay.bypassed or getattr(local, "in_sandbox", False):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & WRITE_FLAGS):
            return
        for position, folder in paths:
            path, fd = args[position], -1 if folder is None else args[folder]
            if isinstance(path, (str, bytes, os.PathLike)) and os.fspath(path) not in ("", b"", ":memory:"):
                local.in_sandbox = True
                try:
                    key, real = self.overlay.find(path, True, fd if fd >= 0 else None)
                finally:
                    local.in_sandbox = False
                special = mode_of(real) and not stat.S_ISREG(mode_of(real)) and not is_folder(real)
                if not special and not self.overlay.excludes(key):
                    self._stop(event, os.fsdecode(path))

    def _stop(self, event: str, path: str) -> None:
        frame: Any = sys._getframe(2)
        with self.overlay.bypass():
            os.makedirs(self.overlay.folder, exist_ok=True)
            with open(f"{self.overlay.folder}/{ESCAPED}", "w", encoding="utf-8", errors="replace") as file:
                file.write(f"{event} of {path} at {frame.f_code.co_filename}:{frame.f_lineno}")
        os._exit(1)


class ModuleFinder:
    """Finds modules that the program has written itself."""

    def __init__(self, overlay: Overlay) -> None:
        self.overlay = overlay

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> Any:
        if self.overlay.bypassed or not self.overlay.has_changes():
            return None
        keys = [self.overlay.key(folder or ".", True) for folder in (sys.path if path is None else path)]
        upper_folders = [self.overlay.upper + key for key in keys if self.overlay.in_upper(key)]
        return machinery.PathFinder.find_spec(name, upper_folders) if upper_folders else None


class ScandirIterator:
    """What ``os.scandir`` returns for a folder of the view."""

    def __init__(self, key: str, path: Any, names: list[str]) -> None:
        self._entries = (DirEntry(key, path, name) for name in names)

    def __iter__(self) -> ScandirIterator:
        return self

    def __next__(self) -> DirEntry:
        return next(self._entries)

    def __enter__(self) -> ScandirIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._entries.close()


class DirEntry:
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

    def _is(self, is_kind: Callable[[int], bool], follow_symlinks: bool) -> bool:
        try:
            return is_kind(self.stat(follow_symlinks=follow_symlinks).st_mode)
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


def _last_name(path: Any) -> str:
    return os.fsdecode(path).rstrip("/").rpartition("/")[2]


def _remove_finder(finder: object) -> None:
    if finder in sys.meta_path:
        sys.meta_path.remove(finder)
