"""The save schedule: all ranks of a program on this machine checkpoint after the same step, without blocking.

Rank 0 announces the step in a shared page of memory. Each step synchronises the ranks' computation, so no
rank is more than a step ahead of rank 0. A rank that is further ahead, or late, misses the announced step and
writes nothing. Checkpoints count only if all ranks have theirs.
"""

from __future__ import annotations

import mmap
import os
import secrets

BYTES = 4096
AHEAD = 2  # steps
STEP, LAUNCH = 0, 1  # positions in the page, of eight bytes each


class SaveSchedule:
    """``path``: of the page, the same for all ranks of one launch only. ``leads``: this is rank 0.

    Raises OSError if the page cannot be created.
    """

    def __init__(self, path: str, leads: bool) -> None:
        self.leads = leads
        handle = _made(path)
        try:
            self._words = memoryview(mmap.mmap(handle, BYTES)).cast("Q")
        finally:
            os.close(handle)

    @property
    def launch(self) -> int:
        """A number that is common to the ranks of this launch, and unique to it."""
        return int(self._words[LAUNCH])

    def agrees(self, wants: bool, steps: int) -> bool:
        """Whether all ranks write a checkpoint now, after ``steps`` steps.

        ``wants``: this rank would like to.
        """
        if self.leads and wants and self._words[STEP] < steps:
            self._words[STEP] = steps + AHEAD
        return bool(self._words[STEP] == steps)


def _made(path: str) -> int:
    """An open page, complete from the moment it has its name."""
    new = f"{path}.{os.getpid()}"
    handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(handle, 0, BYTES)
        os.pwrite(handle, secrets.token_bytes(8), 8 * LAUNCH)
        try:
            os.link(new, path)
            return os.dup(handle)
        except FileExistsError:
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    finally:
        os.close(handle)
        os.unlink(new)
