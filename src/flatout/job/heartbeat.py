"""The heartbeat of a program: a memory-mapped page that the program writes and its monitor reads.

Neither waits for the other. FLATOUT_HEARTBEAT names the folder of the heartbeats of one run. Every Python process
of the program has these files in it:

    heartbeat.<pid>    the page: 8-byte numbers at the places below
    stack.<pid>        receives the Python stack on SIGNAL, through the descriptor STACK
    failed.<pid>       JSON: the exception that ended it

Writing a number takes a tenth of a microsecond, reads no clock and makes no system call. Hooks count the
steps (`agent.step_counters`). Checkpoints report themselves (`saved`, `checkpoint_read`), at no cost without a monitor.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any

from flatout.job.streams import avoid_closed_streams

FOLDER = "FLATOUT_HEARTBEAT"
BYTES = 4096
# Places in the page. HEARTBEATS: signs of life that no other place counts. SAVES: number of checkpoints. SAVED:
# the step of the newest, plus 1. SAVED_AT: steps of this process when it was written. WENT_ON: number of
# checkpoints read. NOT_FINITE: the step with a loss that is not finite, plus 1. RANK: the rank, plus 1.
# SIGNAL: requests the stack, which is written to the descriptor STACK. ENDING: its exit handlers run.
(
    HEARTBEATS,
    STEPS,
    BACKWARDS,
    BATCHES,
    SAVES,
    SAVED,
    SAVED_AT,
    WENT_ON,
    NOT_FINITE,
    RANK,
    SIGNAL,
    STACK,
    ENDING,
) = range(13)


class HeartbeatPage:
    """The page of this process.

    ``words`` are the numbers. If the page cannot be mapped, they stay in private memory.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.words: Any = array("Q", bytes(BYTES))
        try:
            self._map()
        except (OSError, ValueError):
            pass  # the monitor is gone, or its file system is full: the program does not need the page

    @avoid_closed_streams()
    def _map(self) -> None:
        import mmap

        # The file may exist, from the same process before an exec.
        handle = os.open(
            os.path.join(self.folder, f"heartbeat.{self.pid}"),
            os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            os.posix_fallocate(handle, 0, BYTES)  # without it, a full disk would raise SIGBUS later
            page = mmap.mmap(handle, BYTES)
            page[:] = bytes(BYTES)
            self.words = memoryview(page).cast("Q")
        finally:
            os.close(handle)


class RemoteHeartbeat:
    """The page of another process.

    Raises OSError if it is missing, and ValueError if it is not complete yet.
    """

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
        """Return the number of signs of life so far."""
        return self[HEARTBEATS] + self[STEPS] + self[BACKWARDS] + self[BATCHES]

    @property
    def rank(self) -> int | None:
        return self[RANK] - 1 if self[RANK] else None


_own: HeartbeatPage | None = None


def begin(folder: str) -> HeartbeatPage:
    """Create the page of this process. A forked child creates its own."""
    global _own
    _own = HeartbeatPage(folder)
    return _own


_exactly = False


def set_exact_resume(exactly: bool = True) -> None:
    """Set whether flatout resumes this program from its own checkpoints.

    Then the program's own checkpoints do not count.
    """
    global _exactly
    _exactly = exactly
    if not exactly and _own is not None:
        _own.words[SAVED] = 0


_own_way: Callable[[str], None] | None = None


def on_own_resume(observe: Callable[[str], None]) -> None:
    """Register ``observe``, which is called with the file or folder from which a program resumes by itself."""
    global _own_way
    _own_way = observe


def resumes_by_itself(place: str | os.PathLike[str]) -> None:
    """Report that this program resumes by itself from checkpoints in ``place``."""
    if _own_way is not None:
        _own_way(os.fspath(place))


def saved(step: int | None = None) -> None:
    """Report a complete checkpoint from which this program can resume.

    ``step`` is its number of steps, if known.
    """
    if _own is not None and not (_exactly and step is None):
        words = _own.words
        words[SAVED_AT] = words[STEPS]
        if step is not None:
            words[SAVED] = step + 1
        words[SAVES] += 1
        words[HEARTBEATS] += 1


def mark_resume_point() -> None:
    """Report that the steps so far repeated those of an earlier start. From here on they are new."""
    if _own is not None:
        words = _own.words
        words[HEARTBEATS] += words[STEPS]
        words[STEPS] = 0


def checkpoint_read() -> None:
    """Report that this program has read a checkpoint."""
    if _own is not None:
        _own.words[WENT_ON] += 1
        _own.words[HEARTBEATS] += 1
