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

SYSTEM = ("/dev", "/proc", "/sys")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
LINKS = 40  # as the kernel: more links in one path are a circle
REMOVED = ".removed-by-the-program"  # is nowhere, so the kernel says that there is no such file
NOWHERE, INHERITED = "", "."  # of `moved`: no original content; what the folder above says


class Overlay:
    def __init__(self, folder: str, outside: tuple[str, ...] = ()) -> None:
        """``outside``: folders that are left alone, besides those of the system and of caches."""
        self.folder = os.path.realpath(folder)
        self.upper = f"{self.folder}/files"
        self._list = f"{self.folder}/moved"
        self._moved: dict[str, str] = {}
        # folder as it is written -> its key, whether it is as the user has it; until a folder or a link changes
        self._folders: dict[str, str] = {}
        self._untouched: dict[str, bool] = {}
        self._seen = 0  # bytes of the list
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)
        self._count = itertools.count()
        self.own = threading.local()  # busy: flatout uses the real files; answering: the sandbox acts
        home = os.path.expanduser("~")
        caches = [os.environ[name] for name in CACHES if os.environ.get(name)]
        temporary = os.environ.get("TMPDIR") or "/tmp"
        left_alone = [*SYSTEM, self.folder, *outside, temporary, *caches, f"{home}/.cache", f"{home}/.triton"]
        self._outside = tuple({os.path.realpath(path) + "/" for path in left_alone})
        self._project = os.path.join(os.path.realpath(self.cwd()), "")  # users keep projects in /tmp

    def _renew_lock(self) -> None:
        """Threads of one process share what is above: what one reads is replaced, never changed, by another."""
        self._lock = threading.RLock()

    # -- who asks ---------------------------------------------------------------------------------------------------

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Inside, the sandbox does not act: flatout's own code uses the real files."""
        before, self.own.busy = self.busy, True
        try:
            yield
        finally:
            self.own.busy = before

    @property
    def busy(self) -> bool:
        return getattr(self.own, "busy", False)

    # -- paths ------------------------------------------------------------------------------------------------------

    def cwd(self) -> str:
        return self._logical(posix.getcwd())

    def path_of(self, handle: int) -> str:
        """Return the path of an open file or folder in the view."""
        return self._logical(posix.readlink(f"/proc/self/fd/{handle}"))

    def _logical(self, path: str) -> str:
        if f"{path}/".startswith(f"{self.upper}/"):
            return path[len(self.upper) :] or "/"
        for key, there in self._moved.items():
            if there and f"{path}/".startswith(f"{there}/"):
                return key + path[len(there) :]
        return path

    def is_outside(self, path: object) -> bool:
        """Whether a path is left alone: not a path, or one of the system, of a cache or of flatout."""
        return not isinstance(path, (str, bytes, os.PathLike)) or self.leaves_alone(self.key(path))

    def leaves_alone(self, key: str) -> bool:
        key += "/"
        if not key.startswith(self._outside):
            return False
        longest = max(len(folder) for folder in self._outside if key.startswith(folder))
        return not key.startswith(self._project) or longest > len(self._project)

    def key(self, path: Any, follow: bool = False) -> str:
        return self.find(path, follow)[0]

    def find(self, path: Any, follow: bool = True, at: int | None = None) -> tuple[str, str]:
        """Return the key of a path, and where it lies, or would lie: the real path. ``at``: an open folder."""
        text = os.fsdecode(path)
        if not text:
            return "", ""
        if not text.startswith("/"):
            text = f"{self.cwd() if at is None else self.path_of(at)}/{text}"
        self.changed()
        folder, _, name = text.rstrip("/").rpartition("/")
        if name in ("", ".", ".."):
            key = self._walk(text)
        else:
            folders = self._folders
            above = folders.get(folder)
            if above is None:
                above = folders[folder] = self._walk(folder)
            key = f"{above}/{name}"
            place = self.place(key)
            if not ((follow or text.endswith("/")) and _is_link(place)):
                return key, place
            key = self._walk(key)
        return key, self.place(key)

    def _walk(self, text: str) -> str:
        key, rest, links = "", text.split("/")[::-1], 0
        while rest:
            name = rest.pop()
            if name == "..":
                key = key.rpartition("/")[0]
            elif name not in ("", "."):
                place = self.place(f"{key}/{name}")
                if _is_link(place):
                    links += 1
                    if links > LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), text)
                    target = posix.readlink(place)
                    key = "" if target.startswith("/") else key
                    rest += target.split("/")[::-1]
                else:
                    key = f"{key}/{name}"
        return key

    def place(self, key: str) -> str:
        """Return where the content of a key lies; if there is none, a path with which the kernel reports why."""
        if not self._seen or self.leaves_alone(key):
            return key or "/"
        above = self.upper + key
        if mode_of(above):
            return above
        below = self.below(key)
        if below is not None and (not key or mode_of(below)):
            return below
        folder, _, name = key.rpartition("/")
        parent = self.place(folder)
        if not is_folder(parent) or parent == self.upper + folder:
            return f"{parent}/{name}"
        return f"{parent}/{REMOVED}" if below is None else below

    def below(self, key: str) -> str | None:
        """Return where the user's content of a key lies, or None if nothing of it belongs to the key any more."""
        folder, moved = key, self._moved
        while moved:
            there = moved.get(folder)
            if there is not None:
                return there + key[len(folder) :] if there else None
            if not folder:
                break
            folder = folder.rpartition("/")[0]
        return key or "/"

    # -- the list of what has moved, shared by all processes --------------------------------------------------------

    def changed(self) -> bool:
        """Whether the program has changed anything; first read what its other processes have."""
        try:
            size = posix.stat(self._list).st_size
        except OSError:
            size = 0
        if size != self._seen:
            with self._lock:
                self._read_list()
        return bool(size)

    def _read_list(self) -> None:
        with self.looking(), open(self._list, "rb") as file:
            file.seek(self._seen)
            text = file.read()
        pairs = text.count(b"\0") // 2
        fields = os.fsdecode(text).split("\0")[: 2 * pairs]  # the rest is being written
        moved = dict(self._moved)
        for key, there in zip(fields[::2], fields[1::2], strict=True):
            if there == INHERITED:
                moved.pop(key, None)
            elif key:
                moved[key] = there
        self._moved, self._folders, self._untouched = moved, {}, {}
        self._seen += sum(len(os.fsencode(field)) + 1 for field in fields)

    def note(self, *moves: tuple[str, str]) -> None:
        """Record moves, or only that a folder or a link has changed, in one write."""
        if not self._seen:
            self.begin()
        self._append("".join(f"{key}\0{there}\0" for key, there in moves or [("", NOWHERE)]))
        self.changed()

    def begin(self) -> None:
        """Make an empty list: asking for one that is not there takes longer."""
        with self.looking():
            os.makedirs(self.folder, exist_ok=True)
        self._append("")

    def _append(self, text: str) -> None:
        handle = posix.open(self._list, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            posix.write(handle, os.fsencode(text))
        finally:
            posix.close(handle)

    def hide(self, key: str) -> None:
        """Hide what the user has at a key."""
        self.note((key, NOWHERE))

    def hides(self, key: str) -> bool:
        return self.below(key) is None and not self.holds(key)

    def holds(self, key: str) -> bool:
        """Whether the program has made or changed this itself."""
        return _lstat(self.upper + key) is not None

    # -- reading ----------------------------------------------------------------------------------------------------

    def reading(self, path: Any, follow: bool = True, at: int | None = None) -> Any:
        """Return the real path of what the program sees there."""
        if not isinstance(path, (str, bytes, os.PathLike)) or (not self.changed() and at is None):
            return path
        text = os.fsdecode(path)
        if at is None and text.startswith("/"):
            folder, _, name = text.rpartition("/")
            untouched = self._untouched
            known = untouched.get(folder)
            if known is None:
                known = untouched[folder] = self._is_untouched(folder)
            if known and name not in ("", ".", "..") and not (follow and _is_link(text)):
                return path
        place = self.find(path, follow, at)[1]
        return os.fsencode(place) if isinstance(path, bytes) else place

    def _is_untouched(self, folder: str) -> bool:
        key = self._walk(folder)
        moved = any(path.rpartition("/")[0] == key for path in self._moved)
        return not moved and self.below(key) == folder and not self.holds(key)

    def names(self, key: str) -> list[str]:
        """Return the names in a folder of the view."""
        below, above = self.below(key), self.upper + key
        moved = {
            path.rpartition("/")[2]: there
            for path, there in self._moved.items()
            if path and path.rpartition("/")[0] == key
        }
        found = dict.fromkeys(name for name, there in moved.items() if there and mode_of(there))
        if below is not None and is_folder(below):
            found |= dict.fromkeys(name for name in posix.listdir(below) if name not in moved)
        if is_folder(above):
            found |= dict.fromkeys(posix.listdir(above))
        return list(found)

    # -- changing ---------------------------------------------------------------------------------------------------

    def writing(self, path: Any, flags: int, at: int | None = None) -> Any:
        """Return the real path to open with these flags: above, or where the program itself must fail."""
        exclusive = flags & os.O_CREAT and flags & os.O_EXCL
        key, place = self.find(path, not (exclusive or flags & os.O_NOFOLLOW), at)
        mode = mode_of(place)
        if not key or self.leaves_alone(key) or (mode and place == self.upper + key):
            return place
        if not mode:
            return self.fresh(key) if flags & os.O_CREAT else place
        if exclusive or not stat.S_ISREG(mode):
            return place
        if not posix.access(place, os.W_OK):
            raise _denied(place, path)
        self.copy_up(key, with_content=not flags & os.O_TRUNC)
        return self.upper + key

    def fresh(self, key: str) -> str:
        """Return the real path of a new entry, whose folder then exists above; in a folder that does not, one that fails."""
        folder, _, name = key.rpartition("/")
        place = self.place(folder)
        if not is_folder(place):
            return f"{place}/{name}"
        _check_access(place, folder)
        self.mirror(folder)
        return self.upper + key

    def mirror(self, folder: str) -> None:
        """Make a folder of the user above, with its mode and times."""
        above = self.upper + folder
        if _lstat(above) is not None:
            return
        if folder:
            self.mirror(folder.rpartition("/")[0])
        about = posix.stat(self.below(folder) or "/")
        with self._times_kept(folder):
            with self.looking():
                os.makedirs(above, exist_ok=True)  # another process may do the same
            posix.chmod(above, stat.S_IMODE(about.st_mode) | stat.S_IRWXU)
            posix.utime(above, ns=(about.st_atime_ns, about.st_mtime_ns))
        self.note()

    @contextmanager
    def _times_kept(self, key: str) -> Iterator[None]:
        """Keep the times of the folder of a key: what is only copied up is not new to the program."""
        folder = self.upper + key.rpartition("/")[0]
        about = _lstat(folder) if key else None
        yield
        if about is not None:
            posix.utime(folder, ns=(about.st_atime_ns, about.st_mtime_ns))

    def copy_up(self, key: str, with_content: bool = True) -> None:
        """Copy what the user has at a key, so that the program can change it."""
        with self._lock:  # a second thread would replace what the first has changed
            self._copy_up(key, with_content)

    def _copy_up(self, key: str, with_content: bool) -> None:
        place = self.below(key)
        if place is None or self.holds(key):
            return
        if is_folder(place):
            self.mirror(key)
            return
        import shutil

        self.mirror(key.rpartition("/")[0])
        copy = f"{self.folder}/copy-{os.getpid()}-{next(self._count)}"
        with self.looking(), self._times_kept(key):
            if with_content:
                shutil.copy2(place, copy, follow_symlinks=False)
            else:
                open(copy, "wb").close()
                shutil.copymode(place, copy)
            posix.rename(copy, self.upper + key)

    def remove(self, key: str) -> None:
        """Remove a file, a link or an empty folder from the view."""
        folder = key.rpartition("/")[0]
        _check_access(self.place(folder), folder)
        mode = mode_of(self.upper + key)
        if mode:
            (posix.rmdir if stat.S_ISDIR(mode) else posix.unlink)(self.upper + key)
        below = self.below(key)
        if below is not None and mode_of(below):
            self.hide(key)
        elif not stat.S_ISREG(mode):
            self.note()

    def move(self, source: str, target: str) -> None:
        """Rename within the view; ``target`` is free. What the user has stays where it is and gets another key."""
        folder = source.rpartition("/")[0]
        _check_access(self.place(folder), folder)
        self.mirror(target.rpartition("/")[0])
        if self.holds(source):
            posix.rename(self.upper + source, self.upper + target)
        below = self.below(source)
        inner = [(path, there) for path, there in self._moved.items() if path.startswith(f"{source}/")]
        old = [(path, INHERITED) for path in self._moved if path.startswith((f"{source}/", f"{target}/"))]
        self.note(
            *old,
            (target, below if below is not None and mode_of(below) else NOWHERE),
            *[(target + path[len(source) :], there) for path, there in inner],
            (source, NOWHERE),
        )


def _lstat(path: str) -> os.stat_result | None:
    try:
        return posix.lstat(path)
    except (OSError, ValueError):
        return None


def mode_of(path: str) -> int:
    """Return the kind and permissions of what is at a path, without following a link; 0 if there is nothing."""
    about = _lstat(path)
    return about.st_mode if about is not None else 0


def is_folder(path: str) -> bool:
    return stat.S_ISDIR(mode_of(path))


def _is_link(path: str) -> bool:
    return stat.S_ISLNK(mode_of(path))


def _check_access(place: str, folder: str) -> None:
    """Raise as the kernel would if the user may not change a folder, which lies at ``place``."""
    if not posix.access(place, os.W_OK | os.X_OK):
        raise _denied(place, folder)


def _denied(place: str, path: object) -> OSError:
    folder = place if is_folder(place) else place.rpartition("/")[0] or "/"
    number = errno.EROFS if posix.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    return OSError(number, os.strerror(number), path)
