r"""An append-only journal of small values in order, verified block by block when it is read.

    FLATOUTJ 2\n    then blocks:    length (4 bytes), digest (4 bytes), payload

The digest of a block covers the previous digest and its own payload, so a block is valid only after the
blocks it was written after. A payload is compressed JSON: the checks of its entries, of one byte each, as
hexadecimal digits, and their values.
"""

from __future__ import annotations

import fcntl
import json
import os
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.checkpoint.disk import PRIVATE_FILE
from flatout.job.streams import avoid_closed_streams
from flatout.schema.errors import CheckpointError, StorageError

HEADER = b"FLATOUTJ 2\n"
BLOCK = struct.Struct("<II")
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class JournalPosition:
    """A position in a journal: its length in bytes, and the digest of its last block."""

    bytes: int = len(HEADER)
    digest: int = 0

    def to_json(self) -> dict[str, int]:
        return {"bytes": self.bytes, "digest": self.digest}

    @staticmethod
    def from_json(data: object) -> JournalPosition:
        if type(data) is not dict or any(type(data.get(name)) is not int for name in ("bytes", "digest")):
            raise CheckpointError("the position in the journal is invalid")
        return JournalPosition(data["bytes"], data["digest"])


class ValueJournal:
    """Writes a journal. ``after``: continue after a position and cut off the rest; None: start from scratch.

    Raises StorageError."""

    @avoid_closed_streams()
    def __init__(self, path: Path, after: JournalPosition | None = None) -> None:
        self.path = path
        try:
            flags = (
                os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if after is None else 0)
            )
            self._file = os.open(path, flags, PRIVATE_FILE)
            with suppress(OSError):  # not every file system has locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.position = after or JournalPosition()
            if after is None:
                self._write(HEADER)
            else:
                os.ftruncate(self._file, after.bytes)
                os.lseek(self._file, after.bytes, os.SEEK_SET)
        except OSError as error:
            raise self._failure(error) from error

    def append(self, checks: bytes | bytearray, values: Sequence[str]) -> None:
        """Append one block. ``values``: JSON of each entry.

        Raises StorageError, also if the journal would exceed its maximum size."""
        payload = zlib.compress(f'["{checks.hex()}",[{",".join(values)}]]'.encode(), 1)
        size = self.position.bytes + BLOCK.size + len(payload)
        if size > MAX_BYTES:
            raise StorageError(f"the journal {self.path} would exceed its maximum of {MAX_BYTES >> 20} MiB.")
        digest = zlib.crc32(payload, self.position.digest)
        try:
            self._write(BLOCK.pack(len(payload), digest) + payload)
        except OSError as error:
            raise self._failure(error) from error
        self.position = JournalPosition(size, digest)

    def flush(self) -> None:
        """Wait until all of it is on the disk. Raises StorageError."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise self._failure(error) from error

    def close(self) -> None:
        os.close(self._file)

    def _failure(self, error: OSError) -> StorageError:
        return StorageError(f"cannot keep a journal in {self.path}: {error.strerror}.")

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


def is_written(path: Path) -> bool:
    """Whether a run that still lives writes this journal."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(file)
    return False


def read_journal(path: Path, end: JournalPosition) -> tuple[bytes, list[Any]]:
    """The checks and the values of all entries up to a position.

    Raises CheckpointError with the reason (without a full stop) if they are invalid."""
    checks, values, digest = bytearray(), list[Any](), 0
    try:
        if end.bytes > MAX_BYTES:
            raise CheckpointError(
                f"the journal should have {end.bytes:,} bytes, and the maximum is {MAX_BYTES:,}"
            )
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            data = file.read(end.bytes)
    except OSError as error:
        raise CheckpointError(f"the journal {path} cannot be read: {error.strerror}") from None
    if len(data) < end.bytes:
        raise CheckpointError(
            f"the journal {path} has {len(data):,} bytes, and the checkpoint was made at {end.bytes:,}"
        )
    if not data.startswith(HEADER):
        raise CheckpointError(f"{path} is not a flatout journal")
    start = len(HEADER)
    while start < len(data):
        try:
            length, expected = BLOCK.unpack_from(data, start)
            payload = data[start + BLOCK.size : start + BLOCK.size + length]
            digest = zlib.crc32(payload, digest)
            if len(payload) != length or digest != expected:
                raise ValueError("it is not what was written")
            block_checks, block_values = json.loads(zlib.decompress(payload))
            if 2 * len(block_values) != len(block_checks):
                raise ValueError("values without a check")
            checks += bytes.fromhex(block_checks)
            values += block_values
        except (ValueError, TypeError, struct.error, zlib.error) as error:
            raise CheckpointError(f"the journal {path} is corrupt at byte {start:,}: {error}") from None
        start += BLOCK.size + length
    if digest != end.digest:
        raise CheckpointError(f"the journal {path} belongs to another run")
    return bytes(checks), values
