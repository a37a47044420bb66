"""The value log: everything that steered a script, in order.

It is recorded while the script trains and read during a replay. An *entry* is a value that reached Python
from tensors, clocks or the data. An *event* is a place that the script passes. Both update `flow`, a running
hash of the control flow. Each entry holds one byte of it and each step all of it, so that a different path is
detected where it starts.
"""

from __future__ import annotations

import json
import threading
import zlib
from array import array
from collections.abc import Callable
from typing import Any, NoReturn

from flatout.checkpoint.journal import JournalEntries, JournalPosition, ValueJournal
from flatout.schema.errors import StorageError

FLOAT, INTEGER, TRUE, FALSE, NONE, TEXT, BYTES, ARRAY, JSON, LARGE, RAISED, MARK, INTEGERS = range(1, 14)
LONGER = frozenset((TEXT, BYTES, ARRAY, JSON, RAISED, INTEGERS))
WORD = 1 << 63
# bytes per value, and in total; larger values keep a digest only
SHORT, MOST_LONGER, MOST_OF_LONGER = 64, 1 << 22, 1 << 28
BLOCK = 1 << 13  # entries
here = threading.get_ident
ERRORS = {kind.__name__: kind for kind in (RuntimeError, ValueError, TypeError, IndexError)}


class LargeValue:
    """Stands in for a value that was too large to be kept; the recomputed value must have its digest."""

    def __init__(self, digest: int) -> None:
        self.digest = digest


class _Unheard:
    """A reusable context inside which nothing is recorded."""

    def __init__(self, value_log: ValueLog) -> None:
        self._value_log = value_log

    def __enter__(self) -> None:
        self._value_log.deaf += 1

    def __exit__(self, *about: object) -> None:
        self._value_log.deaf -= 1


class ValueLog:
    """Records or replays the values and events of a script.

    ``going``: replaying, until `end`. ``began``: training has started; before it, tensors have values in a
    replay, too. ``deaf``: above 0, nothing is recorded, e.g. inside a data set or flatout itself.

    ``refuse`` is called with a reason where the script differs from the log, and does not return.
    ``complain`` gets the reason why recording stops.
    """

    def __init__(self, refuse: Callable[[str], NoReturn], complain: Callable[[str], None]) -> None:
        self.refuse, self.complain = refuse, complain
        self.main = threading.get_ident()
        self.going = self.began = False
        self.deaf = 0
        self.unheard = _Unheard(self)
        self.flow = self.events = 0
        self.steps = 0
        self.entries = JournalEntries()
        self.journal: ValueJournal | None = None
        self.broken = ""
        self._longer_bytes = 0
        self._at = self._float = self._integer = self._longer = 0
        self._target = -1

    # -- recording ------------------------------------------------------------------------------------------

    def record(self, journal: ValueJournal) -> None:
        self.journal = journal

    def breaks(self, why: str) -> None:
        """Stop recording."""
        self.journal, self.broken = None, why
        self.entries.clear()

    @property
    def observes(self) -> bool:
        """Whether the actions of this thread are part of the recorded control flow."""
        return not self.deaf and here() == self.main

    def put(self, value: Any, at: int, comes_again: bool = False) -> None:
        """Add a value.

        ``at``: place in the code, a small number that is the same in each run. ``comes_again``: a replay
        computes the value again, so a digest is enough for a long one.
        """
        self.flow = flow = hash((self.flow, at))
        entries, kind = self.entries, type(value)
        if kind is float:
            entries.codes.append(FLOAT)
            entries.floats.append(value)
        elif kind is bool:
            entries.codes.append(TRUE if value else FALSE)
        elif kind is int and -WORD <= value < WORD:
            entries.codes.append(INTEGER)
            entries.integers.append(value)
        else:
            self._put_longer(value, comes_again)
        entries.checks.append(flow & 255)
        if len(entries.codes) >= BLOCK:
            self.write()

    def _put_longer(self, value: object, comes_again: bool) -> None:
        entries = self.entries
        if value is None:
            entries.codes.append(NONE)
            return
        code, data = encoded(value)
        if len(data) > (SHORT if comes_again else MOST_LONGER) or self._longer_bytes > MOST_OF_LONGER:
            entries.codes.append(LARGE)
            entries.integers.append(zlib.crc32(data))
        else:
            self._longer_bytes += len(data)
            entries.codes.append(code)
            entries.longer.append(data)

    def mark(self) -> None:
        """Mark the end of a step."""
        self.steps += 1
        if self.going:
            if self._take() != self.flow:
                self._went_elsewhere()
            return
        self.entries.codes.append(MARK)
        self.entries.integers.append(self.flow)
        self.entries.checks.append(self.flow & 255)
        if len(self.entries.codes) >= BLOCK:
            self.write()

    def write(self) -> JournalPosition | None:
        """Write everything to the journal and return the position; None if recording has stopped."""
        if self.journal is not None and self.entries.codes:
            try:
                self.journal.append(self.entries)
            except StorageError as error:
                self.breaks(str(error))
                self.complain(f"from here on this script cannot be resumed exactly: {error}")
        if self.journal is not None or self.broken:
            self.entries.clear()
        return self.journal.place if self.journal is not None else None

    # -- events ---------------------------------------------------------------------------------------------

    def event(self, what: int) -> bool:
        """Log an event; return whether the log ends here."""
        self.flow = hash((self.flow, what))
        self.events += 1
        return self.events == self._target

    # -- replaying ------------------------------------------------------------------------------------------

    def play(self, entries: JournalEntries, events: int) -> None:
        """Replay these entries up to the event with this number."""
        self.entries, self._target, self.going = entries, events, True

    def take(self, at: int) -> Any:
        """Return the value recorded at this place."""
        self.flow = hash((self.flow, at))
        return self._take()

    def _take(self) -> Any:
        entries, at = self.entries, self._at
        if at >= len(entries.codes):
            self.refuse(f"in step {self.steps + 1} the script reads more values than in the first run")
        code = entries.codes[at]
        if entries.checks[at] != self.flow & 255:
            self._went_elsewhere()
        self._at = at + 1
        if code == FLOAT:
            self._float += 1
            return entries.floats[self._float - 1]
        if code in (INTEGER, MARK, LARGE):
            self._integer += 1
            value = entries.integers[self._integer - 1]
            return LargeValue(value) if code == LARGE else value
        if code in (TRUE, FALSE):
            return code == TRUE
        if code in LONGER:
            self._longer += 1
            return decoded(code, entries.longer[self._longer - 1])
        return None

    def end(self) -> None:
        """End the replay at the resume point; recording starts again."""
        if self._at != len(self.entries.codes):
            self.refuse(
                f"at the resume point, the script has not read {len(self.entries.codes) - self._at} of the values that it read in "
                f"the first run"
            )
        self.going, self._target = False, -1
        self.entries = JournalEntries()

    def _went_elsewhere(self) -> NoReturn:
        self.refuse(f"in step {self.steps + 1} the script takes another path than in the first run")


def encoded(value: Any) -> tuple[int, bytes]:
    """Encode a value as a code and bytes. Raises TypeError for unsupported types."""
    kind = type(value)
    if kind is str:
        return TEXT, value.encode("utf-8", "surrogatepass")
    if kind is bytes:
        return BYTES, value
    if (
        kind is list
        and len(value) > 16
        and set(map(type, value)) == {int}
        and min(value) > -WORD
        and max(value) < WORD
    ):
        words = next(
            array(code, value)
            for code in "bhiq"
            if abs(max(value, key=abs)) < 1 << (8 * array(code).itemsize - 1)
        )
        return INTEGERS, words.typecode.encode() + zlib.compress(words.tobytes(), 1)
    if isinstance(value, Exception):
        return RAISED, json.dumps(
            [kind.__name__ if kind.__name__ in ERRORS else "RuntimeError", str(value)]
        ).encode()
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):
        head = json.dumps([value.dtype.str, list(value.shape)]).encode()
        return ARRAY, b"%d " % len(head) + head + value.tobytes()
    if kind is complex:
        return JSON, json.dumps({"complex": [value.real, value.imag]}).encode()
    return JSON, json.dumps(value).encode()


def decoded(code: int, data: bytes) -> Any:
    if code == TEXT:
        return data.decode("utf-8", "surrogatepass")
    if code == BYTES:
        return data
    if code == INTEGERS:
        words = array(chr(data[0]))
        words.frombytes(zlib.decompress(data[1:]))
        return words.tolist()
    if code == ARRAY:
        import numpy

        size, _, rest = data.partition(b" ")
        dtype, shape = json.loads(rest[: int(size)])
        return numpy.frombuffer(rest[int(size) :], numpy.dtype(dtype)).reshape(shape).copy()
    found = json.loads(data)
    if code == RAISED:
        return ERRORS.get(found[0], RuntimeError)(found[1])
    return complex(*found["complex"]) if type(found) is dict and "complex" in found else found
