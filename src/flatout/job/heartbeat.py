"""The heartbeat of a program: a memory-mapped page that the program writes and its monitor reads.

Neither waits for the other. FLATOUT_HEARTBEAT names the folder of the heartbeats of one run. Every Python process
of the program has these files in it:

    heartbeat.<pid>    the page: 8-byte numbers in the slots below
    stack.<pid>        receives the Python stack on SIGNAL, through the descriptor STACK
    failed.<pid>       JSON: the exception that ended it

Writing a number takes a tenth of a microsecond, reads no clock and makes no system call. Hooks count the
steps (`agent.step_counters`). Checkpoints report themselves, at no cost without a monitor.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from typing import Any

from flatout.job.streams import avoid_closed_streams

FOLDER = "FLATOUT_HEARTBEAT"
PAGE_BYTES = 4096
# Slots of the page. HEARTBEATS: activity that no other slot counts. CHECKPOINTS: number written.
# CHECKPOINT_STEP: of the newest, plus 1. STEPS_AT_CHECKPOINT: steps of this process when it was written.
# NOT_FINITE: the step with a loss that is not finite, plus 1. RANK: the rank, plus 1. SIGNAL: requests the
# stack, which is written to the descriptor STACK. EXITING: its exit handlers run.
(
    HEARTBEATS,
    STEPS,
    BACKWARDS,
    BATCHES,
    CHECKPOINTS,
    CHECKPOINT_STEP,
    STEPS_AT_CHECKPOINT,
    CHECKPOINTS_READ,
    NOT_FINITE,
    RANK,
    SIGNAL,
    STACK,
    EXITING,
) = range(13)


class HeartbeatPage:
    """The page of this process.

    ``words``: the slots. If the page cannot be mapped, they stay in private memory.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.words: Any = array("Q", bytes(PAGE_BYTES))
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
            os.posix_fallocate(handle, 0, PAGE_BYTES)  # without it, a full disk would raise SIGBUS later
            page = mmap.mmap(handle, PAGE_BYTES)
            page[:] = bytes(PAGE_BYTES)
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
            self._page = mmap.mmap(handle, PAGE_BYTES, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.words = memoryview(self._page).cast("Q")
        self.pid = int(path.rpartition(".")[2])

    def __getitem__(self, slot: int) -> int:
        return int(self.words[slot])

    @property
    def activity(self) -> int:
        """Return a number that grows while the program makes progress."""
        return self[HEARTBEATS] + self[STEPS] + self[BACKWARDS] + self[BATCHES]

    @property
    def rank(self) -> int | None:
        return self[RANK] - 1 if self[RANK] else None


_page: HeartbeatPage | None = None


def begin(folder: str) -> HeartbeatPage:
    """Create the page of this process. A forked child creates its own."""
    global _page
    _page = HeartbeatPage(folder)
    return _page


_exact_resume = False


def set_exact_resume(exact: bool = True) -> None:
    """Set whether flatout resumes this program from its own checkpoints.

    Then the program's own checkpoints do not count.
    """
    global _exact_resume
    _exact_resume = exact
    if not exact and _page is not None:
        _page.words[CHECKPOINT_STEP] = 0


_report_own_resume: Callable[[str], None] | None = None


def on_own_resume(report: Callable[[str], None]) -> None:
    """Register ``observe``, which is called with the file or folder from which a program resumes by itself."""
    global _report_own_resume
    _report_own_resume = report


def resumes_by_itself(path: str | os.PathLike[str]) -> None:
    """Report that this program resumes by itself from checkpoints in ``path``."""
    if _report_own_resume is not None:
        _report_own_resume(os.fspath(path))


def checkpoint_written(step: int | None = None) -> None:
    """Report a complete checkpoint from which this program can resume.

    ``step`` is its number of steps, if known.
    """
    if _page is not None and not (_exact_resume and step is None):
        words = _page.words
        words[STEPS_AT_CHECKPOINT] = words[STEPS]
        if step is not None:
            words[CHECKPOINT_STEP] = step + 1
        words[CHECKPOINTS] += 1
        words[HEARTBEATS] += 1


def mark_resume_point() -> None:
    """Report that the steps so far repeated those of an earlier start. From here on they are new."""
    if _page is not None:
        words = _page.words
        words[HEARTBEATS] += words[STEPS]
        words[STEPS] = 0


def checkpoint_read() -> None:
    """Report that this program has read a checkpoint."""
    if _page is not None:
        _page.words[CHECKPOINTS_READ] += 1
        _page.words[HEARTBEATS] += 1
