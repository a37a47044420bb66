"""What reaches the disk, and when: a file is written and flushed, a folder is flushed, a folder is renamed. Nothing else here touches the disk to write."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 22
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700


@dataclass(frozen=True)
class Stored:
    """What a file holds: its length and SHA-256."""

    bytes: int
    sha256: str


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> Stored:
    """Write a new file and flush it to the disk. Raises OSError. Other threads run meanwhile: neither writing nor hashing holds the interpreter."""
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        for part in parts:
            whole = memoryview(part).cast("B")
            for start in range(0, len(whole), CHUNK_BYTES):
                rest = whole[start:start + CHUNK_BYTES]
                digest.update(rest)
                size += len(rest)
                while rest:
                    rest = rest[os.write(handle, rest):]
        os.fsync(handle)
    finally:
        os.close(handle)
    return Stored(size, digest.hexdigest())


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of an ordinary file. Raises OSError, also for a link and for what is longer than ``most_bytes``."""
    with os.fdopen(_open_to_read(path), "rb") as file:
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise OSError(errno.EFBIG, f"is longer than {most_bytes:,} bytes", str(path))
    return found


def what_is_stored(path: Path) -> Stored:
    """Raises OSError, also for a link."""
    digest, size = hashlib.sha256(), 0
    with os.fdopen(_open_to_read(path), "rb", buffering=0) as file:
        while part := file.read(CHUNK_BYTES):
            digest.update(part)
            size += len(part)
    return Stored(size, digest.hexdigest())


def _open_to_read(path: Path) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe does not hold us
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not an ordinary file", str(path))
    return handle


def make_folder(path: Path) -> None:
    os.mkdir(path, PRIVATE_FOLDER)


def flush_folder(path: Path) -> None:
    """Its names reach the disk. Raises OSError; a file system that cannot do it (EINVAL) has nothing to flush."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def move_folder(source: Path, target: Path) -> None:
    """Under its new name, and so on the disk. Raises OSError where there is something of that name."""
    os.rename(source, target)
    flush_folder(target.parent)


def remove_folder(path: Path) -> None:
    """First its name, then its content: what is half gone looks like nothing that counts."""
    leaving = path.with_name(f".leaving-{path.name.lstrip('.')}-{os.getpid()}")
    os.rename(path, leaving)
    shutil.rmtree(leaving, ignore_errors=True)
