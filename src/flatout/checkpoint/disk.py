"""All writes to the disk: write and flush a file, flush a folder, rename a folder. JSON of a bounded size.

Files are private to their owner (0600), and so are folders (0700), whatever the umask. Nothing is read or
removed through a link.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.job.folder import count_json_values
from flatout.schema.errors import CheckpointError

CHUNK_BYTES = 1 << 22
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
REMOVING_PREFIX = ".removing-"
# Errors of file systems that cannot flush a folder. Its files are still flushed.
FLUSH_UNSUPPORTED = {errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS}


@dataclass(frozen=True)
class FileDigest:
    """The length and SHA-256 of a file."""

    bytes: int
    sha256: str


def write_file(path: Path, parts: Iterable[bytes | memoryview]) -> FileDigest:
    """Write a new file and flush it to the disk. Raises OSError.

    Other threads run meanwhile: writing and hashing release the interpreter lock."""
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
        drop_from_page_cache(handle)
    finally:
        os.close(handle)
    return FileDigest(size, digest.hexdigest())


def drop_from_page_cache(handle: int) -> None:
    """Drop a flushed file from the kernel's page cache.

    A later read then sees what the disk has, and the memory is free for the training."""
    if hasattr(os, "posix_fadvise"):
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        except OSError:
            pass  # it is only advice


class HashedFileReader:
    """An ordinary file, read once from start to end, with the digest of what was read.

    Raises OSError, also for a link (the file or its folder), a pipe or a device; opening these does not
    block."""

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
        status = os.fstat(self._handle)
        self.length = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self._handle)
            raise OSError(errno.EINVAL, "it is not an ordinary file", str(path))

    def readinto(self, memory: bytearray | memoryview) -> int:
        """Fill ``memory`` up to the end of the file and return the number of bytes read."""
        rest, read = memoryview(memory).cast("B"), 0
        while read < len(rest):
            count = os.readv(self._handle, [rest[read : read + CHUNK_BYTES]])
            if not count:
                break
            self._digest.update(rest[read : read + count])
            read += count
        self.bytes += read
        return read

    @property
    def digest(self) -> FileDigest:
        return FileDigest(self.bytes, self._digest.hexdigest())

    def __enter__(self) -> HashedFileReader:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._handle)


def read_file(path: Path, max_bytes: int) -> bytes:
    """The content of an ordinary file.

    Raises OSError, also for a link or a file longer than ``max_bytes``."""
    with HashedFileReader(path) as file:
        if file.length > max_bytes:
            raise OSError(errno.EFBIG, f"it is longer than {max_bytes:,} bytes", str(path))
        content = bytearray(file.length)
        del content[file.readinto(content) :]
    return bytes(content)


def digest_of_file(path: Path, expected: FileDigest) -> FileDigest:
    """The length and digest of a file. Raises OSError, also for a link.

    If the length differs from ``expected``, the file is not read and the digest is ""."""
    with HashedFileReader(path) as file:
        if file.length != expected.bytes:
            return FileDigest(file.length, "")
        memory = bytearray(min(CHUNK_BYTES, file.length + 1))
        while file.readinto(memory):
            pass
        return file.digest


def make_folder(path: Path) -> None:
    os.mkdir(path, PRIVATE_FOLDER)
    os.chmod(path, PRIVATE_FOLDER)


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in FLUSH_UNSUPPORTED:
            raise
    finally:
        os.close(handle)


def move_folder(source: Path, target: Path) -> None:
    """Rename a folder and flush the new name to the disk. Raises OSError if the name is taken."""
    os.rename(source, target)
    flush_folder(target.parent)


def remove_folder(path: Path) -> None:
    """Rename a folder, then delete its content, so that a half-removed folder does not count.

    Removes only links."""
    if not path.name.startswith(REMOVING_PREFIX):
        removing = path.with_name(f"{REMOVING_PREFIX}{path.name.lstrip('.')}-{os.getpid()}")
        os.rename(path, removing)
        path = removing
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


# Untrusted JSON: the values that it can turn into are counted before any is created.

MAX_JSON_BYTES = 1 << 27
MAX_JSON_VALUES = 1 << 22  # a value of three characters takes up to 100 bytes


def to_json(content: object) -> bytes:
    """Raises CheckpointError for content that `from_json` would reject: at once rather than when it is needed."""
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    if why := _why_too_large(data):
        raise CheckpointError(f"its plain values are {why}; keep large ones in tensors or arrays.")
    return data


def from_json(data: bytes | bytearray) -> Any:
    """Raises ValueError for invalid or oversized JSON, including nesting that is too deep."""
    if why := _why_too_large(data):
        raise ValueError(why)
    try:
        return json.loads(data.decode("utf-8"), parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("lists are nested too deeply") from None


def _why_too_large(data: bytes | bytearray) -> str:
    if len(data) > MAX_JSON_BYTES:
        return f"{len(data):,} bytes long, and the maximum is {MAX_JSON_BYTES:,}"
    values = count_json_values(data)
    return f"too many: {values:,}, and the maximum is {MAX_JSON_VALUES:,}" if values > MAX_JSON_VALUES else ""


def _reject_constant(spelled: str) -> Any:
    raise ValueError(f"{spelled} is not a valid number")
