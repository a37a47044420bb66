"""The heartbeat of a program: a memory-mapped page that the program writes and its monitor reads.

Neither waits for the other. FLATOUT_HEARTBEAT names the folder of the heartbeats of one run. Every Python process
of the program has these files in it:

    heartbeat.<pid>    the page: 8-byte numbers in the order of `Slot`
    stack.<pid>        receives the Python stack after a signal
    failed.<pid>       JSON: the exception that ended it

Writing a number takes a tenth of a microsecond, reads no clock and makes no system call. Hooks count the
steps (`agent.heartbeat`). Checkpoints report themselves, at no cost without a monitor.
"""

import os
from array import array
from collections.abc import Callable
from typing import Any

from flatout.job.streams import avoid_closed_streams

FOLDER = "FLATOUT_HEARTBEAT"
PAGE_BYTES = 4096


class Slot:
    """Indices of the numbers in a page."""

    HEARTBEATS = 0  # activity that no other slot counts
    STEPS = 1
    BACKWARDS = 2
    BATCHES = 3
    CHECKPOINTS = 4  # number written
    CHECKPOINT_STEP = 5  # of the newest, plus 1
    STEPS_AT_CHECKPOINT = 6  # steps of this process when it was written
    CHECKPOINTS_READ = 7
    NOT_FINITE = 8  # the step with a loss that is not finite, plus 1
    RANK = 9  # plus 1
    STACK_SIGNAL = 10  # requests the stack
    STACK_DESCRIPTOR = 11  # where it is written
    EXITING = 12  # exit handlers run


class HeartbeatPage:
    """The page of this process.

    ``slots``: the slots. If the page cannot be mapped, they stay in private memory."""

    def __init__(self, folder: str) -> None:
        self.folder, self.pid = folder, os.getpid()
        self.slots: Any = array("Q", bytes(PAGE_BYTES))
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
            self.slots = memoryview(page).cast("Q")
        finally:
            os.close(handle)


class RemoteHeartbeat:
    """The page of another process.

    Raises OSError if it is missing, and ValueError if it is not complete yet."""

    def __init__(self, path: str) -> None:
        import mmap

        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            self._page = mmap.mmap(handle, PAGE_BYTES, access=mmap.ACCESS_READ)
        finally:
            os.close(handle)
        self.slots = memoryview(self._page).cast("Q")
        self.pid = int(path.rpartition(".")[2])

    def __getitem__(self, slot: int) -> int:
        return int(self.slots[slot])

    @property
    def activity(self) -> int:
        """Return a number that grows while the program makes progress."""
        return self[Slot.HEARTBEATS] + self[Slot.STEPS] + self[Slot.BACKWARDS] + self[Slot.BATCHES]

    @property
    def rank(self) -> int | None:
        return self[Slot.RANK] - 1 if self[Slot.RANK] else None


_page: HeartbeatPage | None = None


def begin(folder: str) -> HeartbeatPage:
    """Create the page of this process. A forked child creates its own."""
    global _page
    _page = HeartbeatPage(folder)
    return _page


_exact_resume = False


def set_exact_resume(exact: bool = True) -> None:
    """Set whether flatout resumes this program from its own checkpoints.

    Then the program's own checkpoints do not count."""
    global _exact_resume
    _exact_resume = exact
    if not exact and _page is not None:
        _page.slots[Slot.CHECKPOINT_STEP] = 0


_report_own_resume: Callable[[str], None] | None = None


def on_own_resume(report: Callable[[str], None]) -> None:
    """Register ``report``: called with the file or folder from which a program resumes by itself."""
    global _report_own_resume
    _report_own_resume = report


def resumes_by_itself(path: str | os.PathLike[str]) -> None:
    """Report that this program resumes by itself from checkpoints in ``path``."""
    if _report_own_resume is not None:
        _report_own_resume(os.fspath(path))


def checkpoint_written(step: int | None = None) -> None:
    """Report a complete checkpoint from which this program can resume.

    ``step`` is its number of steps, if known."""
    if _page is not None and not (_exact_resume and step is None):
        slots = _page.slots
        slots[Slot.STEPS_AT_CHECKPOINT] = slots[Slot.STEPS]
        if step is not None:
            slots[Slot.CHECKPOINT_STEP] = step + 1
        slots[Slot.CHECKPOINTS] += 1
        slots[Slot.HEARTBEATS] += 1


def mark_resume_point() -> None:
    """Report that the steps so far repeated those of an earlier start. From here on they are new."""
    if _page is not None:
        slots = _page.slots
        slots[Slot.HEARTBEATS] += slots[Slot.STEPS]
        slots[Slot.STEPS] = 0


def checkpoint_read() -> None:
    """Report that this program has read a checkpoint."""
    if _page is not None:
        _page.slots[Slot.CHECKPOINTS_READ] += 1
        _page.slots[Slot.HEARTBEATS] += 1
