"""Temporary folders. A name carries the process that owns it, so the next command removes those of ended processes.

$TMPDIR/flatout-<kind>-<number>.<start>.<view>-<random>/     0700, numbers in hexadecimal

The start time tells a process from a later one of the same number. exec keeps both, and `flatout run` becomes the
program by exec. ``view`` is the boot and the PID namespace in which they hold: hosts and containers that share a
folder leave each other's alone. Without /proc, a name carries no owner, and only an ordinary end removes the folder.
"""

import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from flatout.schema.errors import StorageError

MEMORY_FOLDER = "/dev/shm"  # on a disk, heartbeat pages would be written back, and a full or slow disk would stall the program
OWNED_NAME = re.compile(r"flatout-\w+-(([0-9a-f]+)\.[0-9a-f]+\.([0-9a-f]{8}))-\w+")


def temporary(kind: str, in_memory: bool = False) -> Path:
    """Create a folder that this process owns; first remove what ended processes left. Raises StorageError."""
    sweep()
    folder = MEMORY_FOLDER if in_memory and os.access(MEMORY_FOLDER, os.W_OK) else None
    try:
        return Path(tempfile.mkdtemp(prefix=f"flatout-{kind}-{owner()}-", dir=folder))
    except OSError as error:
        raise StorageError(
            f"cannot create a temporary folder: {error.strerror}. Set TMPDIR to a writable one."
        ) from error


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    folder = temporary(kind)
    try:
        yield folder
    finally:
        remove(folder)


def owned_path(folder: Path) -> Path:
    """Return a path in ``folder`` for a folder of this process, which `leftover_folders` finds once it has ended."""
    return folder / f"flatout-files-{owner()}-0"


def remove(folder: Path) -> None:
    """Remove a temporary folder; a git repository forgets its work trees in there.

    It follows no link, and never raises."""
    for link in folder.glob("*/.git") if folder.name.startswith("flatout-revisions-") else ():
        with suppress(OSError, ValueError):
            metadata = link.parent / link.read_text(encoding="utf-8").removeprefix("gitdir: ").rstrip("\n")
            linked = metadata / (metadata / "gitdir").read_text(encoding="utf-8").rstrip("\n")
            if metadata.parent.name == "worktrees" and linked.samefile(link):
                shutil.rmtree(metadata)
    shutil.rmtree(folder, ignore_errors=True)


def owner(process: int | str = "self") -> str:
    """Return a process as it stands in a name, or "" if it has ended or there is no /proc."""
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as file:
            pid, _, rest = file.read().partition(" ")
        state, *fields = rest.rpartition(")")[2].split()
        return "" if state in "ZX" else f"{int(pid):x}.{int(fields[18]):x}.{_view()}"
    except (FileNotFoundError, ProcessLookupError):
        return ""


@cache
def _view() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    return f"{zlib.crc32(boot, os.stat('/proc/self/ns/pid').st_ino):08x}"


@cache
def sweep() -> None:
    """Remove the folders of this user whose processes have ended, once per process. It never raises.

    A folder that a living process names in its environment stays: a program may outlive the process that flatout
    became, for example below a shell that has ended."""
    with suppress(OSError):
        roots = {Path(tempfile.gettempdir()), Path(MEMORY_FOLDER)}
        leftovers = [path for root in roots for path in leftover_folders(root)]
        for pid in os.listdir("/proc") if leftovers else ():
            with suppress(OSError):
                environment = Path("/proc", pid, "environ").read_bytes() if pid.isdigit() else b""
                leftovers = [path for path in leftovers if os.fsencode(path.name) not in environment]
        for path in leftovers:
            remove(path)


def leftover_folders(folder: Path) -> Iterator[Path]:
    """Yield the folders of this user in ``folder`` whose processes have ended."""
    for name in os.listdir(folder) if folder.is_dir() else ():
        path = folder / name
        with suppress(OSError, ValueError):
            if name.startswith("flatout-") and path.lstat().st_uid == os.geteuid():
                entries = [name] if OWNED_NAME.fullmatch(name) else os.listdir(path)
                owners = filter(OWNED_NAME.fullmatch, entries)
                ended = list(map(_has_ended, owners))  # ranks share a folder, with an entry of each
                if ended and all(ended):
                    yield path


def _has_ended(name: str) -> bool:
    match = OWNED_NAME.fullmatch(name)
    return match is not None and match[3] == _view() and owner(int(match[2], 16)) != match[1]
