"""The value log: everything that steered a script, in order.

It is recorded while the script trains and read during a replay. An *entry* is a value that reached Python
from tensors, clocks or the data. An *event* is a place that the script passes. Both update `flow`, a running
hash of the control flow. Each entry holds one byte of it and each step all of it, so that a different path is
detected where it starts.

It lies in an append-only journal, verified block by block when it is read:

    FLATOUTJ 2\\n    then blocks:    length (4 bytes), digest (4 bytes), payload

The digest of a block covers the previous digest and its own payload, so a block is valid only after the
blocks it was written after. A payload is compressed JSON: the checks of its entries, of one byte each, as
hexadecimal digits, and their values.
"""

from __future__ import annotations

import base64
import fcntl
import json
import math
import os
import struct
import threading
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

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
        return dict(vars(self))

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


# Characters of a value, and in total; larger values keep a digest only. Those of LONG_CHARS are measured compressed.
MAX_SHORT_CHARS, LONG_CHARS, MAX_VALUE_CHARS, MAX_LONG_CHARS = 64, 1 << 16, 1 << 22, 1 << 28
BLOCK_ENTRIES = 1 << 13  # entries
STEP_MARK = "mark"  # the end of a step
thread_id = threading.get_ident
to_json = json.JSONEncoder(separators=(",", ":")).encode
ERRORS = {kind.__name__: kind for kind in (RuntimeError, ValueError, TypeError, IndexError)}


class LargeValue:
    """Stands in for a value that was too large to be kept; the recomputed value must have its digest."""

    def __init__(self, digest: int) -> None:
        self.digest = digest


class _Unrecorded:
    """A reusable context inside which nothing is recorded."""

    def __init__(self, value_log: ValueLog) -> None:
        self._value_log = value_log

    def __enter__(self) -> None:
        self._value_log.paused += 1

    def __exit__(self, *exception: object) -> None:
        self._value_log.paused -= 1


class ValueLog:
    """Records or replays the values and events of a script.

    ``replaying``: replaying, until `end`. ``training_began``: training has started; before it, tensors have values in a
    replay, too. ``paused``: above 0, nothing is recorded, e.g. inside a data set or flatout itself.

    ``refuse`` is called with a reason where the script differs from the log, and does not return.
    ``report`` gets the reason why recording stops."""

    def __init__(self, refuse: Callable[[str], NoReturn], report: Callable[[str], None]) -> None:
        self.refuse, self.report = refuse, report
        self.main = threading.get_ident()
        self.replaying = self.training_began = False
        self.paused = 0
        self.unrecorded = _Unrecorded(self)
        self.flow = self.event_count = 0
        self.steps = 0
        self.checks: bytearray | bytes = bytearray()
        self.values: list[Any] = []  # JSON while recording, values while replaying
        self.journal: ValueJournal | None = None
        self.why_stopped = ""
        self._long_chars = self._next_entry = 0
        self._resume_event = -1

    # -- recording

    def record(self, journal: ValueJournal) -> None:
        self.journal = journal

    def stop_recording(self, why: str) -> None:

        self.journal, self.why_stopped = None, why
        self.checks, self.values = bytearray(), []

    @property
    def observes(self) -> bool:
        """Whether the actions of this thread are part of the recorded control flow."""
        return not self.paused and thread_id() == self.main

    def put(self, value: Any, place_id: int, recomputed: bool = False) -> None:
        """Add a value.

        ``place_id``: a place in the code, as a small number that is the same in each run. ``recomputed``: a replay
        computes the value again, so a digest is enough for a long one."""
        self.flow = hash((self.flow, place_id))
        text = encode(value)
        if len(text) > MAX_SHORT_CHARS:
            size = len(text) if len(text) < LONG_CHARS else len(zlib.compress(text.encode(), 1))
            if recomputed or size > MAX_VALUE_CHARS or self._long_chars > MAX_LONG_CHARS:
                text = json.dumps({"large": zlib.crc32(text.encode())})
            else:
                self._long_chars += size
        self._append(text)

    def mark(self) -> None:
        """Mark the end of a step."""
        self.steps += 1
        if not self.replaying:
            self._append(f'{{"{STEP_MARK}":{self.flow}}}')
        elif self._take() != {STEP_MARK: self.flow}:
            self._reject_path()

    def _append(self, text: str) -> None:
        assert isinstance(self.checks, bytearray)
        self.checks.append(self.flow & 255)
        self.values.append(text)
        if len(self.values) >= BLOCK_ENTRIES or len(text) > LONG_CHARS:
            self.write()

    def write(self) -> JournalPosition | None:
        """Write everything to the journal and return the position; None if recording has stopped."""
        if self.journal is not None and self.values:
            try:
                self.journal.append(self.checks, self.values)
            except StorageError as error:
                self.stop_recording(str(error))
                self.report(f"from here on this script cannot be resumed exactly: {error}")
        if self.journal is not None or self.why_stopped:
            self.checks, self.values = bytearray(), []
        return self.journal.position if self.journal is not None else None

    # -- events

    def event(self, what: int) -> bool:
        """Log an event; return whether the log ends here."""
        self.flow = hash((self.flow, what))
        self.event_count += 1
        return self.event_count == self._resume_event

    # -- replaying

    def replay(self, entries: tuple[bytes, Sequence[Any]], resume_event: int) -> None:
        """Replay these checks and values up to the event with this number."""
        self.checks, self.values = entries[0], list(entries[1])
        self._resume_event, self.replaying = resume_event, True

    def take(self, place_id: int) -> Any:
        """Return the value recorded at this place."""
        self.flow = hash((self.flow, place_id))
        value = self._take()
        return decode(value) if type(value) is dict and len(value) == 1 else value

    def _take(self) -> Any:
        number = self._next_entry
        if number >= len(self.checks):
            self.refuse(f"in step {self.steps + 1} the script reads more values than in the first run")
        if self.checks[number] != self.flow & 255:
            self._reject_path()
        self._next_entry = number + 1
        return self.values[number]

    def end(self) -> None:
        """End the replay at the resume point; recording starts again."""
        if self._next_entry != len(self.checks):
            self.refuse(
                f"at the resume point, the script has not read {len(self.checks) - self._next_entry} of the values that it read in "
                f"the first run"
            )
        self.replaying, self._resume_event = False, -1
        self.checks, self.values = bytearray(), []

    def _reject_path(self) -> NoReturn:
        self.refuse(f"in step {self.steps + 1} the script takes another path than in the first run")


def encode(value: Any) -> str:
    """Encode a value as JSON. Raises TypeError for unsupported types."""
    kind = type(value)
    if kind is int or (kind is float and math.isfinite(value)):
        return repr(value)
    if kind is bytes:
        value = {"bytes": base64.b64encode(value).decode()}
    elif kind is complex:
        value = {"complex": [value.real, value.imag]}
    elif isinstance(value, Exception):
        value = {"raised": [kind.__name__ if kind.__name__ in ERRORS else "RuntimeError", str(value)]}
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        value = {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    return to_json(value)


def decode(value: dict[str, Any]) -> Any:
    """Return the value that `encode` has spelled as an object of one field."""
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "complex":
        return complex(*content)
    if kind == "raised":
        return ERRORS[content[0]](content[1])
    if kind == "large":
        return LargeValue(content)
    if kind == "array":
        import numpy

        return (
            numpy.frombuffer(base64.b64decode(content[2]), numpy.dtype(content[0])).reshape(content[1]).copy()
        )
    return value
