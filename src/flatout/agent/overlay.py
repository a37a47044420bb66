"""A view of the file system for one program: the user's files, with the program's own changes above them.

    <folder>/files/<path>   what the program made or changed, under its own path
    <folder>/moved          pairs (path, where its original content lies now), for what it removed and renamed

Both lie on the disk, so that all processes of the program have one view. Paths are resolved in the view, link by
link, as the kernel would. A canonical path of the view is called a key here; "" is the root.
"""

from __future__ import annotations

import errno
import itertools
import os
import posix  # its functions are the originals of those that the sandbox replaces
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SYSTEM_FOLDERS = ("/dev", "/proc", "/sys")
CACHE_VARIABLES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
MAX_LINKS = 40  # as the kernel: more links in one path are a circle
REMOVED = ".removed-by-the-program"  # is nowhere, so the kernel says that there is no such file
NOWHERE, INHERITED = "", "."  # of `moved`: no original content; what the folder above says


class Overlay:
    def __init__(self, folder: str, excluded: tuple[str, ...] = ()) -> None:
        """``excluded``: folders that are left alone, besides those of the system and of caches."""
        self.folder = os.path.realpath(folder)
        self.upper = f"{self.folder}/files"
        self._moves_file = f"{self.folder}/moved"
        self._moved: dict[str, str] = {}
        # folder as it is written -> its key, whether it is as the user has it; until a folder or a link changes
        self._folders: dict[str, str] = {}
        self._untouched: dict[str, bool] = {}
        self._bytes_read = 0  # bytes of `moved`
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)
        self._copy_numbers = itertools.count()
        self.local = threading.local()  # bypassed: flatout uses the real files; in_sandbox: the sandbox acts
        home = os.path.expanduser("~")
        caches = [os.environ[name] for name in CACHE_VARIABLES if os.environ.get(name)]
        temporary = os.environ.get("TMPDIR") or "/tmp"
        excluded_paths = [
            *SYSTEM_FOLDERS,
            self.folder,
            *excluded,
            temporary,
            *caches,
            f"{home}/.cache",
            f"{home}/.triton",
        ]
        self._excluded = tuple({os.path.realpath(path) + "/" for path in excluded_paths})
        self._project = os.path.join(os.path.realpath(self.cwd()), "")  # users keep projects in /tmp

    def _renew_lock(self) -> None:
        """Threads share the dicts above without it: one with other content replaces them."""
        self._lock = threading.RLock()

    # -- the bypass

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Inside, the sandbox does not act: flatout's own code uses the real files."""
        was_bypassed, self.local.bypassed = self.bypassed, True
        try:
            yield
        finally:
            self.local.bypassed = was_bypassed

    @property
    def bypassed(self) -> bool:
        return getattr(self.local, "bypassed", False)

    # -- paths

    def cwd(self) -> str:
        return self._logical(posix.getcwd())

    def path_of(self, handle: int) -> str:
        """Return the path of an open file or folder in the view."""
        return self._logical(posix.readlink(f"/proc/self/fd/{handle}"))

    def _logical(self, path: str) -> str:
        if f"{path}/".startswith(f"{self.upper}/"):
            return path[len(self.upper) :] or "/"
        for key, real in self._moved.items():
            if real and f"{path}/".startswith(f"{real}/"):
                return key + path[len(real) :]
        return path

    def excludes_path(self, path: object) -> bool:
        """Whether a path is left alone: not a path, or one of the system, of a cache or of flatout."""
        return not isinstance(path, (str, bytes, os.PathLike)) or self.excludes(self.key(path))

    def excludes(self, key: str) -> bool:
        key += "/"
        if not key.startswith(self._excluded):
            return False
        longest = max(len(folder) for folder in self._excluded if key.startswith(folder))
        return not key.startswith(self._project) or longest > len(self._project)

    def key(self, path: Any, follow: bool = False) -> str:
        return self.find(path, follow)[0]

    def find(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> tuple[str, str]:
        """Return the key of a path, and where it lies, or would lie: the real path. ``dir_fd``: an open folder."""
        text = os.fsdecode(path)
        if not text:
            return "", ""
        if not text.startswith("/"):
            text = f"{self.cwd() if dir_fd is None else self.path_of(dir_fd)}/{text}"
        self.has_changes()
        folder, _, name = text.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            key = self._walk(text)
        else:
            folders = self._folders
            parent_key = folders.get(folder)
            if parent_key is None:
                parent_key = folders[folder] = self._walk(folder)
            key = f"{parent_key}/{name}"
            real = self.real_path(key)
            if not ((follow or text.endswith("/")) and _is_link(real)):
                return key, real
            key = self._walk(key)
        return key, self.real_path(key)

    def _walk(self, text: str) -> str:
        key, rest, links = "", text.split("/")[::-1], 0
        while rest:
            name = rest.pop()
            if name == "..":
                key = key.rpartition("/")[0]
            elif name not in ("", "."):
                real = self.real_path(f"{key}/{name}")
                if _is_link(real):
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                    target = posix.readlink(real)
                    key = "" if target.startswith("/") else key
                    rest += target.split("/")[::-1]
                else:
                    key = f"{key}/{name}"
        return key

    def real_path(self, key: str) -> str:
        """Return where the content of a key lies; if there is none, a path with which the kernel reports why."""
        if not self._bytes_read or self.excludes(key):
            return key or "/"
        upper = self.upper + key
        if mode_of(upper):
            return upper
        lower = self.lower(key)
        if lower is not None and (not key or mode_of(lower)):
            return lower
        folder, _, name = key.rpartition("/")
        parent = self.real_path(folder)
        if not is_folder(parent) or parent == self.upper + folder:
            return f"{parent}/{name}"
        return f"{parent}/{REMOVED}" if lower is None else lower

    def lower(self, key: str) -> str | None:
        """Return where the user's content of a key lies, or None if nothing of it belongs to the key any more."""
        folder, moved = key, self._moved
        while moved:
            real = moved.get(folder)
            if real is not None:
                return real + key[len(folder) :] if real else None
            if not folder:
                break
            folder = folder.rpartition("/")[0]
        return key or "/"

    # -- the list of what has moved, shared by all processes

    def has_changes(self) -> bool:
        """Whether the program has changed anything; first read what its other processes have."""
        try:
            size = posix.stat(self._moves_file).st_size
        except OSError:
            size = 0
        if size != self._bytes_read:
            with self._lock:
                self._read_moves()
        return bool(size)

    def _read_moves(self) -> None:
        with self.bypass(), open(self._moves_file, "rb") as file:
            file.seek(self._bytes_read)
            text = file.read()
        fields = os.fsdecode(text).split("\0")[: text.count(b"\0") // 2 * 2]  # what follows is being written
        moved = dict(self._moved)
        for key, real in zip(fields[::2], fields[1::2], strict=True):
            if real == INHERITED:
                moved.pop(key, None)
            elif key:
                moved[key] = real
        self._moved, self._folders, self._untouched = moved, {}, {}
        self._bytes_read += sum(len(os.fsencode(field)) + 1 for field in fields)

    def record(self, *moves: tuple[str, str]) -> None:
        """Record moves, or only that a folder or a link has changed, in one write."""
        if not self._bytes_read:
            self.begin()
        self._append("".join(f"{key}\0{real}\0" for key, real in moves or [("", NOWHERE)]))
        self.has_changes()

    def begin(self) -> None:
        """Make an empty list: asking for one that is not there takes longer."""
        with self.bypass():
            os.makedirs(self.folder, exist_ok=True)
        self._append("")

    def _append(self, text: str) -> None:
        handle = posix.open(self._moves_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            posix.write(handle, os.fsencode(text))
        finally:
            posix.close(handle)

    def hide(self, key: str) -> None:
        """Hide what the user has at a key."""
        self.record((key, NOWHERE))

    def hides(self, key: str) -> bool:
        return self.lower(key) is None and not self.in_upper(key)

    def in_upper(self, key: str) -> bool:
        """Whether the program has made or changed this itself."""
        return _lstat(self.upper + key) is not None

    # -- reading

    def path_to_read(self, path: Any, follow: bool = True, dir_fd: int | None = None) -> Any:
        """Return the real path of what the program sees there."""
        if not isinstance(path, (str, bytes, os.PathLike)) or (not self.has_changes() and dir_fd is None):
            return path
        text = os.fsdecode(path)
        if dir_fd is None and text.startswith("/"):
            folder, _, name = text.rpartition("/")
            cache = self._untouched
            untouched = cache.get(folder)
            if untouched is None:
                untouched = cache[folder] = self._is_untouched(folder)
            if untouched and name not in ("", ".", "..") and not (follow and _is_link(text)):
                return path
        real = self.find(path, follow, dir_fd)[1]
        return os.fsencode(real) if isinstance(path, bytes) else real

    def _is_untouched(self, folder: str) -> bool:
        key = self._walk(folder)
        moved = any(path.rpartition("/")[0] == key for path in self._moved)
        return not moved and self.lower(key) == folder and not self.in_upper(key)

    def names(self, key: str) -> list[str]:
        """Return the names in a folder of the view."""
        lower, upper = self.lower(key), self.upper + key
        moved = {
            path.rpartition("/")[2]: real
            for path, real in self._moved.items()
            if path and path.rpartition("/")[0] == key
        }
        names = dict.fromkeys(name for name, real in moved.items() if real and mode_of(real))
        if lower is not None and is_folder(lower):
            names |= dict.fromkeys(name for name in posix.listdir(lower) if name not in moved)
        if is_folder(upper):
            names |= dict.fromkeys(posix.listdir(upper))
        return list(names)

    # -- changing

    def path_to_write(self, path: Any, flags: int, dir_fd: int | None = None) -> Any:
        """Return the real path to open with these flags: above, or where the program itself must fail."""
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        key, real = self.find(path, not (exclusive or flags & os.O_NOFOLLOW), dir_fd)
        mode = mode_of(real)
        if not key or self.excludes(key) or (mode and real == self.upper + key):
            return real
        if not mode:
            return self.new_path(key) if flags & os.O_CREAT else real
        if exclusive or not stat.S_ISREG(mode):
            return real
        if not posix.access(real, os.W_OK):
            raise _denied(real, path)
        self.copy_up(key, with_content=not flags & os.O_TRUNC)
        return self.upper + key

    def new_path(self, key: str) -> str:
        """Return the real path of a new entry, whose folder then exists above; in a folder that does not, one that fails."""
        folder, _, name = key.rpartition("/")
        real = self.real_path(folder)
        if not is_folder(real):
            return f"{real}/{name}"
        _check_access(real, folder)
        self.mirror(folder)
        return self.upper + key

    def mirror(self, folder: str) -> None:
        """Make a folder of the user above, with its mode and times."""
        upper = self.upper + folder
        if _lstat(upper) is not None:
            return
        if folder:
            self.mirror(folder.rpartition("/")[0])
        status = posix.stat(self.lower(folder) or "/")
        with self._times_kept(folder):
            with self.bypass():
                os.makedirs(upper, exist_ok=True)  # another process may do the same
            posix.chmod(upper, stat.S_IMODE(status.st_mode) | stat.S_IRWXU)
            posix.utime(upper, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.record()

    @contextmanager
    def _times_kept(self, key: str) -> Iterator[None]:
        """Keep the times of the folder of a key: what is only copied up is not new to the program."""
        folder = self.upper + key.rpartition("/")[0]
        status = _lstat(folder) if key else None
        yield
        if status is not None:
            posix.utime(folder, ns=(status.st_atime_ns, status.st_mtime_ns))

    def copy_up(self, key: str, with_content: bool = True) -> None:
        """Copy what the user has at a key, so that the program can change it."""
        with self._lock:  # a second thread would replace what the first has changed
            self._copy_up(key, with_content)

    def _copy_up(self, key: str, with_content: bool) -> None:
        real = self.lower(key)
        if real is None or self.in_upper(key):
            return
        if is_folder(real):
            self.mirror(key)
            return
        import shutil

        self.mirror(key.rpartition("/")[0])
        copy = f"{self.folder}/copy-{os.getpid()}-{next(self._copy_numbers)}"
        with self.bypass(), self._times_kept(key):
            if with_content:
                shutil.copy2(real, copy, follow_symlinks=False)
            else:
                open(copy, "wb").close()
                shutil.copymode(real, copy)
            posix.rename(copy, self.upper + key)

    def remove(self, key: str) -> None:
        """Remove a file, a link or an empty folder from the view."""
        folder = key.rpartition("/")[0]
        _check_access(self.real_path(folder), folder)
        mode = mode_of(self.upper + key)
        if mode:
            (posix.rmdir if stat.S_ISDIR(mode) else posix.unlink)(self.upper + key)
        lower = self.lower(key)
        if lower is not None and mode_of(lower):
            self.hide(key)
        elif not stat.S_ISREG(mode):
            self.record()

    def move(self, source: str, target: str) -> None:
        """Rename within the view; ``target`` is free. What the user has stays where it is and gets another key."""
        folder = source.rpartition("/")[0]
        _check_access(self.real_path(folder), folder)
        self.mirror(target.rpartition("/")[0])
        if self.in_upper(source):
            posix.rename(self.upper + source, self.upper + target)
        lower = self.lower(source)
        inside = [(path, real) for path, real in self._moved.items() if path.startswith(f"{source}/")]
        cleared = [(path, INHERITED) for path in self._moved if path.startswith((f"{source}/", f"{target}/"))]
        self.record(
            *cleared,
            (target, lower if lower is not None and mode_of(lower) else NOWHERE),
            *[(target + path[len(source) :], real) for path, real in inside],
            (source, NOWHERE),
        )


def _lstat(path: str) -> os.stat_result | None:
    try:
        return posix.lstat(path)
    except (OSError, ValueError):
        return None


def mode_of(path: str) -> int:
    """Return the kind and permissions of what is at a path, without following a link; 0 if there is nothing."""
    status = _lstat(path)
    return status.st_mode if status is not None else 0


def is_folder(path: str) -> bool:
    return stat.S_ISDIR(mode_of(path))


def _is_link(path: str) -> bool:
    return stat.S_ISLNK(mode_of(path))


def _check_access(real: str, folder: str) -> None:
    if not posix.access(real, os.W_OK | os.X_OK):
        raise _denied(real, folder)


def _denied(real: str, path: object) -> OSError:
    folder = real if is_folder(real) else real.rpartition("/")[0] or "/"
    number = errno.EROFS if posix.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    return OSError(number, os.strerror(number), path)
