"""What steered a program, in order: recorded while it trains, and played back while it is brought to a save again.

An *entry* is a value that came from tensors, clocks or the data to Python. An *event* is a place that the program passes. Both move `flow`, a running hash;
each entry carries a byte of it, and each step all of it, so that a program that goes another way than the first time is noticed there.
"""

from __future__ import annotations

import json
import threading
import zlib
from array import array
from collections.abc import Callable
from typing import Any, NoReturn

from flatout.plan.errors import StorageError
from flatout.state.journal import Entries, Journal, Place

FLOAT, INTEGER, TRUE, FALSE, NONE, TEXT, BYTES, ARRAY, JSON, LARGE, RAISED, MARK, INTEGERS = range(1, 14)
LONGER = frozenset((TEXT, BYTES, ARRAY, JSON, RAISED, INTEGERS))
WORD = 1 << 63
SHORT, MOST_LONGER, MOST_OF_LONGER = 64, 1 << 22, 1 << 28  # bytes of one value, and of all; of what is larger its digest is kept
BLOCK = 1 << 13  # entries
here = threading.get_ident
ERRORS = {kind.__name__: kind for kind in (RuntimeError, ValueError, TypeError, IndexError)}


class Large:
    """In the place of a value that was too large to be kept: what it must be when it is computed again."""

    def __init__(self, digest: int) -> None:
        self.digest = digest


class _Unheard:
    """A context, any number of times: what happens inside is nobody's business."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape

    def __enter__(self) -> None:
        self._tape.deaf += 1

    def __exit__(self, *about: object) -> None:
        self._tape.deaf -= 1


class Tape:
    """``going``: played back, until `end`. ``began``: the training has; before, all tensors have values also where it is played back. ``deaf``: above 0, what
    happens is nobody's business: inside of a data set, of ourselves.

    ``refuse`` is called with a sentence where the program goes another way than the tape, and does not return. ``complain`` hears why nothing more is recorded.
    """

    def __init__(self, refuse: Callable[[str], NoReturn], complain: Callable[[str], None]) -> None:
        self.refuse, self.complain = refuse, complain
        self.main = threading.get_ident()
        self.going = self.began = False
        self.deaf = 0
        self.unheard = _Unheard(self)
        self.flow = self.events = 0
        self.steps = 0
        self.entries = Entries()
        self.journal: Journal | None = None
        self.broken = ""
        self._longer_bytes = 0
        self._at = self._float = self._integer = self._longer = 0
        self._target = -1

    # -- recording ----------------------------------------------------------------------------------------------------------

    def record(self, journal: Journal) -> None:
        self.journal = journal

    def breaks(self, why: str) -> None:
        """Nothing is recorded any more."""
        self.journal, self.broken = None, why
        self.entries.clear()

    @property
    def hears(self) -> bool:
        """Whether what this thread does now belongs to the program's way."""
        return not self.deaf and here() == self.main

    def put(self, value: Any, at: int, comes_again: bool = False) -> None:
        """``at``: where in the program, a small number that is the same each time. ``comes_again``: it will be there again: of a longer one a digest does."""
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

    def _put_longer(self, value: Any, comes_again: bool) -> None:
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
        """A step has ended."""
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

    def write(self) -> Place | None:
        """Everything so far goes to the journal; how far it is then. None where nothing is recorded any more."""
        if self.journal is not None and self.entries.codes:
            try:
                self.journal.append(self.entries)
            except StorageError as error:
                self.breaks(str(error))
                self.complain(f"from here on this program cannot be gone on with exactly: {error}")
        if self.journal is not None or self.broken:
            self.entries.clear()
        return self.journal.place if self.journal is not None else None

    # -- events -------------------------------------------------------------------------------------------------------------

    def event(self, what: int) -> bool:
        """Whether this is where the tape ends."""
        self.flow = hash((self.flow, what))
        self.events += 1
        return self.events == self._target

    # -- playing back -------------------------------------------------------------------------------------------------------

    def play(self, entries: Entries, events: int) -> None:
        """From its beginning up to the event of this number."""
        self.entries, self._target, self.going = entries, events, True

    def take(self, at: int) -> Any:
        """The value that came here the first time."""
        self.flow = hash((self.flow, at))
        return self._take()

    def _take(self) -> Any:
        entries, at = self.entries, self._at
        if at >= len(entries.codes):
            self.refuse(f"in step {self.steps + 1} the program asks for more than it did the first time")
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
            return Large(value) if code == LARGE else value
        if code in (TRUE, FALSE):
            return code == TRUE
        if code in LONGER:
            self._longer += 1
            return decoded(code, entries.longer[self._longer - 1])
        return None

    def end(self) -> None:
        """The program has come to the place of the save: from here on it is recorded again."""
        if self._at != len(self.entries.codes):
            self.refuse(f"the program comes to the place of the save, and has not asked for {len(self.entries.codes) - self._at} values that it had asked for "
                        f"the first time")
        self.going, self._target = False, -1
        self.entries = Entries()

    def _went_elsewhere(self) -> NoReturn:
        self.refuse(f"in step {self.steps + 1} the program goes another way than it did the first time")


def encoded(value: Any) -> tuple[int, bytes]:
    """A code and bytes. Raises TypeError for what a tape does not hold."""
    kind = type(value)
    if kind is str:
        return TEXT, value.encode("utf-8", "surrogatepass")
    if kind is bytes:
        return BYTES, value
    if kind is list and len(value) > 16 and set(map(type, value)) == {int} and min(value) > -WORD and max(value) < WORD:
        words = next(array(code, value) for code in "bhiq" if abs(max(value, key=abs)) < 1 << (8 * array(code).itemsize - 1))
        return INTEGERS, words.typecode.encode() + zlib.compress(words.tobytes(), 1)
    if isinstance(value, Exception):
        return RAISED, json.dumps([kind.__name__ if kind.__name__ in ERRORS else "RuntimeError", str(value)]).encode()
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
        dtype, shape = json.loads(rest[:int(size)])
        return numpy.frombuffer(rest[int(size):], numpy.dtype(dtype)).reshape(shape).copy()
    found = json.loads(data)
    if code == RAISED:
        return ERRORS.get(found[0], RuntimeError)(found[1])
    return complex(*found["complex"]) if type(found) is dict and "complex" in found else found
