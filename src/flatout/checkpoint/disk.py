"""All writes to the disk: write and flush a file, flush a folder, rename a folder.

Files are private to their owner (0600), and so are folders (0700), whatever the umask. Nothing is read or
removed through a link.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

CHUNK_BYTES = 1 << 22
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
LEAVING = ".leaving-"
# Errors of file systems that cannot flush a folder. Its files are still flushed.
CANNOT_FLUSH = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS}


@dataclass(frozen=True)
class Stored:
    """The length and SHA-256 of a file."""

    bytes: int
    sha256: str


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> Stored:
    """Write a new file and flush it to the disk. Raises OSError.

    Other threads run meanwhile: writing and hashing release the interpreter lock.
    """
    digest, size = hashlib.sha256(), 0
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    try:
        os.fchmod(handle, PRIVATE_FILE)
        for part in parts:
            whole = memoryview(part).cast("B")
            for start in range(0, len(whole), CHUNK_BYTES):
                rest = whole[start : start + CHUNK_BYTES]
                digest.update(rest)
                size += len(rest)
                while rest:
                    rest = rest[os.write(handle, rest) :]
        os.fsync(handle)
        forget(handle)
    finally:
        os.close(handle)
    return Stored(size, digest.hexdigest())


def forget(handle: int) -> None:
    """Drop a flushed file from the kernel's page cache.

    A later read then sees what the disk has, and the memory is free for the training.
    """
    if hasattr(os, "posix_fadvise"):
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass  # it is only advice


class HashedFileReader:
    """An ordinary file, read once from start to end, with the digest of what was read.

    Raises OSError, also for a link (the file or its folder), a pipe or a device; opening these does not
    block.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.bytes, self._digest = path, 0, hashlib.sha256()
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._handle = os.open(
                path.name,
                os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY,
                dir_fd=folder,
            )
        except OSError as error:
            error.filename = str(path)
            raise
        finally:
            os.close(folder)
        about = os.fstat(self._handle)
        self.length = about.st_size
        if not stat.S_ISREG(about.st_mode):
            os.close(self._handle)
            raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))

    def into(self, memory: bytearray | memoryview) -> int:
        """Fill ``memory`` up to the end of the file and return the number of bytes read."""
        rest, read = memoryview(memory).cast("B"), 0
        while read < len(rest):
            got = os.readv(self._handle, [rest[read : read + CHUNK_BYTES]])
            if not got:
                break
            self._digest.update(rest[read : read + got])
            read += got
        self.bytes += read
        return read

    @property
    def so_far(self) -> Stored:
        return Stored(self.bytes, self._digest.hexdigest())

    def __enter__(self) -> HashedFileReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        os.close(self._handle)


def read_file(path: Path, most_bytes: int) -> bytes:
    """The content of an ordinary file.

    Raises OSError, also for a link or a file longer than ``most_bytes``.
    """
    with HashedFileReader(path) as file:
        if file.length > most_bytes:
            raise OSError(errno.EFBIG, f"it is longer than {most_bytes:,} bytes", str(path))
        found = bytearray(file.length)
        del found[file.into(found) :]
    return bytes(found)


def what_is_stored(path: Path, expected: Stored) -> Stored:
    """The length and digest of a file. Raises OSError, also for a link.

    If the length differs from ``expected``, the file is not read and the digest is "".
    """
    with HashedFileReader(path) as file:
        if file.length != expected.bytes:
            return Stored(file.length, "")
        memory = bytearray(min(CHUNK_BYTES, file.length + 1))
        while file.into(memory):
            pass
        return file.so_far


def make_folder(path: Path) -> None:
    os.mkdir(path, PRIVATE_FOLDER)
    os.chmod(path, PRIVATE_FOLDER)


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH:
            raise
    finally:
        os.close(handle)


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder and flush the new name to the disk. Raises OSError if the name is taken."""
    os.rename(source, target)
    flush_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Rename a folder, then delete its content, so that a half-removed folder does not count.

    Removes only links.
    """
    if not path.name.startswith(LEAVING):
        leaving = path.with_name(f"{LEAVING}{path.name.lstrip('.')}-{os.getpid()}")
        os.rename(path, leaving)
        path = leaving
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)
