"""The pulse of a program: one page of memory, in a file, into which it writes what it does and which who watches over it reads. Nobody waits for anybody.

The folder of the pulses of one run is named by FLATOUT_PULSE. Every Python process of the program has in it

    pulse.<pid>      the page: numbers of eight bytes, at the places below
    stack.<pid>      where its Python stack is written to when it is asked for (SIGNAL), through the descriptor STACK
    workers.<pid>    the loader workers that it has started: a line each, ``number pid``
    failed.<pid>     JSON: the exception that has ended it

Writing a number costs a tenth of a microsecond, reads no clock and makes no system call. Steps are counted by hooks (`capture.pulse`); saves tell
of themselves (`saved`, `went_on`), and cost nothing where nobody watches.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any

FOLDER = "FLATOUT_PULSE"
BYTES = 4096
# Places in the page. BEATS: signs of life that are none of the others. SAVES: how many; SAVED: the step of the newest, and one more; SAVED_AT: steps of this
# process when it was written. WENT_ON: saves that were read. NOT_FINITE: the step whose loss was not, and one more. RANK: and one more. SIGNAL: asks for the
# stack, which is written to the descriptor STACK.
BEATS, STEPS, PHASE, BACKWARDS, BATCHES, SAVES, SAVED, SAVED_AT, WENT_ON, NOT_FINITE, RANK, SIGNAL, STACK = range(13)
# What a process does. Its own word for it; what is compiled or imported is seen in its stack.
STARTING, IMPORTED, TRAINING, LOADING, OPENING, EVALUATING, BETWEEN, SAVING, ENDING = range(9)


class Pulse:
    """The page of this process. ``words`` are the numbers; where no page can be had, they are kept for nobody."""

    def __init__(self, folder: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.words: Any = array("Q", bytes(BYTES))
        try:
            self._map()
        except (OSError, ValueError):
            pass  # the watcher is gone, or the memory it lies in full: the program does not need it

    def _map(self) -> None:
        import mmap

        # There may be one: of the same process before it has become (exec) what it is now.
        handle = os.open(os.path.join(self.folder, f"pulse.{self.pid}"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, BYTES)  # a page that is missing later would end the program (SIGBUS)
            page = mmap.mmap(handle, BYTES)
            page[:] = bytes(BYTES)
            self.words = memoryview(page).cast("Q")
        finally:
            os.close(handle)


class Seen:
    """The page of another process. Raises OSError where there is none, ValueError for what is no page yet."""

    def __init__(self, path: str) -> None:
        import mmap

        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(handle, BYTES, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.words = memoryview(self._page).cast("Q")
        self.pid = int(path.rpartition(".")[2])

    def __getitem__(self, place: int) -> int:
        return int(self.words[place])

    @property
    def signs(self) -> int:
        """Of life, so far."""
        return self[BEATS] + self[STEPS] + self[BACKWARDS] + self[BATCHES]

    @property
    def rank(self) -> int | None:
        return self[RANK] - 1 if self[RANK] else None


_own: Pulse | None = None


def begin(folder: str) -> Pulse:
    """The page of this process from here on; a forked child begins one of its own."""
    global _own
    _own = Pulse(folder)
    return _own


_exactly = False


def goes_on_exactly(exactly: bool = True) -> None:
    """Whether this program is gone on with from saves of ours: then what it saves itself does not count."""
    global _exactly
    _exactly = exactly
    if not exactly and _own is not None:
        _own.words[SAVED] = 0


_own_way: Callable[[str], None] | None = None


def when_it_resumes_by_itself(hear: Callable[[str], None]) -> None:
    """``hear`` is called with the file or folder that a program goes on from by itself when it is started again."""
    global _own_way
    _own_way = hear


def resumes_by_itself(place: str | os.PathLike[str]) -> None:
    """Said by whoever goes on from saves in ``place``."""
    if _own_way is not None:
        _own_way(os.fspath(place))


def saved(step: int | None = None) -> None:
    """A save is complete from which this program can go on; ``step``: how many steps it is of, where that is known."""
    if _own is not None and not (_exactly and step is None):
        words = _own.words
        words[SAVED_AT] = words[STEPS]
        if step is not None:
            words[SAVED] = step + 1
        words[SAVES] += 1
        words[BEATS] += 1


def goes_on_here() -> None:
    """The steps so far were those of an earlier start, gone through again; what comes now is new."""
    if _own is not None:
        words = _own.words
        words[BEATS] += words[STEPS]
        words[STEPS] = 0


def went_on() -> None:
    """This program has read a save."""
    if _own is not None:
        _own.words[WENT_ON] += 1
        _own.words[BEATS] += 1
