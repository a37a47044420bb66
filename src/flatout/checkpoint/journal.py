r"""An append-only journal of small values in order, verified block by block when it is read.

    FLATOUTJ 1\n    then blocks:    length (4 bytes), digest (4 bytes), payload

The digest of a block covers the previous digest and its own payload, so a block is valid only after the
blocks it was written after. A payload has five columns: a code and a check of one byte each per entry, and
the floats, integers and longer values of the entries, in order.
"""

from __future__ import annotations

import os
import struct
import sys
import zlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.checkpoint.disk import PRIVATE_FILE
from flatout.schema.errors import SaveError, StorageError

HEADER = b"FLATOUTJ 1\n"
BLOCK = struct.Struct("<II")
COLUMNS = struct.Struct("<IIII")  # entries, floats, integers, longer values
MOST_BYTES = 1 << 30
MOST_BLOCK = 64 << 20


@dataclass
class JournalEntries:
    """The columns: ``codes`` and ``checks`` have one byte per entry."""

    codes: bytearray = field(default_factory=bytearray)
    checks: bytearray = field(default_factory=bytearray)
    floats: array[float] = field(default_factory=lambda: array("d"))
    integers: array[int] = field(default_factory=lambda: array("q"))
    longer: list[bytes] = field(default_factory=list)

    def clear(self) -> None:
        for column in (self.codes, self.checks, self.longer):
            column.clear()
        del self.floats[:], self.integers[:]

    def to_bytes(self) -> bytes:
        sizes = array("q", map(len, self.longer))
        head = COLUMNS.pack(len(self.codes), len(self.floats), len(self.integers), len(self.longer))
        return b"".join(
            (
                head,
                self.codes,
                self.checks,
                _little(self.floats),
                _little(self.integers),
                _little(sizes),
                *self.longer,
            )
        )

    def take_up(self, payload: bytes) -> None:
        """Append the entries of a payload. Raises ValueError."""
        if len(payload) < COLUMNS.size:
            raise ValueError("the block has no columns")
        entries, floats, integers, longer = COLUMNS.unpack_from(payload)
        at = COLUMNS.size
        if len(payload) < at + 2 * entries + 8 * (floats + integers + longer):
            raise ValueError("the block ends before its columns")
        self.codes += payload[at : at + entries]
        self.checks += payload[at + entries : at + 2 * entries]
        at += 2 * entries
        columns = []
        for kind, count in (("d", floats), ("q", integers), ("q", longer)):
            columns.append(_native(kind, payload[at : at + 8 * count]))
            at += 8 * count
        self.floats += columns[0]
        self.integers += columns[1]
        for size in columns[2]:
            if not 0 <= size <= len(payload) - at:
                raise ValueError("a value is longer than its block")
            self.longer.append(payload[at : at + size])
            at += size
        if at != len(payload):
            raise ValueError("the block has data after its columns")


@dataclass(frozen=True)
class JournalPosition:
    """A position in a journal: its length in bytes, and the digest of its last block."""

    bytes: int = len(HEADER)
    digest: int = 0

    def to_json(self) -> dict[str, int]:
        return {"bytes": self.bytes, "digest": self.digest}

    @staticmethod
    def from_json(metadata: object) -> JournalPosition:
        if type(metadata) is not dict or any(
            type(metadata.get(name)) is not int for name in ("bytes", "digest")
        ):
            raise SaveError("the position in the journal is invalid")
        return JournalPosition(metadata["bytes"], metadata["digest"])


class ValueJournal:
    """Writes a journal. ``at``: continue after a position and cut off the rest; None: start from scratch.

    Raises StorageError.
    """

    def __init__(self, path: Path, at: JournalPosition | None = None) -> None:
        self.path = path
        try:
            flags = (
                os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_TRUNC if at is None else 0)
            )
            self._file = os.open(path, flags, PRIVATE_FILE)
            self.place = at or JournalPosition()
            if at is None:
                self._write(HEADER)
            else:
                os.ftruncate(self._file, at.bytes)
                os.lseek(self._file, at.bytes, os.SEEK_SET)
        except OSError as error:
            raise StorageError(f"cannot keep a journal in {path}: {error.strerror}.") from error

    def append(self, entries: JournalEntries) -> None:
        """Append one block. Raises StorageError, also if the journal would exceed its maximum size."""
        payload = entries.to_bytes()
        size = self.place.bytes + BLOCK.size + len(payload)
        if size > MOST_BYTES:
            raise StorageError(f"the journal {self.path} would exceed its maximum of {MOST_BYTES >> 20} MiB.")
        digest = zlib.crc32(payload, self.place.digest)
        try:
            self._write(BLOCK.pack(len(payload), digest) + payload)
        except OSError as error:
            raise StorageError(f"cannot keep a journal in {self.path}: {error.strerror}.") from error
        self.place = JournalPosition(size, digest)

    def flush(self) -> None:
        """Wait until all of it is on the disk. Raises StorageError."""
        try:
            os.fdatasync(self._file)
        except OSError as error:
            raise StorageError(f"cannot keep a journal in {self.path}: {error.strerror}.") from error

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._file, data) :]


def read_journal(path: Path, to: JournalPosition) -> JournalEntries:
    """All entries up to a position.

    Raises SaveError with the reason (without a full stop) if they are invalid.
    """
    entries, digest = JournalEntries(), 0
    try:
        if to.bytes > MOST_BYTES:
            raise SaveError(f"the journal should have {to.bytes:,} bytes, and the maximum is {MOST_BYTES:,}")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            data = file.read(to.bytes)
    except OSError as error:
        raise SaveError(f"the journal {path} cannot be read: {error.strerror}") from None
    if len(data) < to.bytes:
        raise SaveError(
            f"the journal {path} has {len(data):,} bytes, and the checkpoint was made at {to.bytes:,}"
        )
    if not data.startswith(HEADER):
        raise SaveError(f"{path} is not a flatout journal")
    at = len(HEADER)
    while at < len(data):
        if at + BLOCK.size > len(data):
            raise SaveError(f"the journal {path} is corrupt at byte {at:,}")
        length, said = BLOCK.unpack_from(data, at)
        payload = data[at + BLOCK.size : at + BLOCK.size + length]
        digest = zlib.crc32(payload, digest)
        if len(payload) != length or length > MOST_BLOCK or digest != said:
            raise SaveError(f"the journal {path} is corrupt at byte {at:,}: it is not what was written")
        try:
            entries.take_up(payload)
        except ValueError as error:
            raise SaveError(f"the journal {path} is corrupt at byte {at:,}: {error}") from None
        at += BLOCK.size + length
    if digest != to.digest:
        raise SaveError(f"the journal {path} belongs to another run")
    return entries


def _little(words: array[Any]) -> bytes:
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()


def _native(kind: str, data: bytes) -> array[Any]:
    words = array(kind)
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return words
