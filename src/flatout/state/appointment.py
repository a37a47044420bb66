"""When the ranks of one program on this machine save: all after the same step, which rank 0 names beforehand in a page of memory. Nobody waits for anybody.

What a rank computes waits for the others in each step, so that no rank is more than a step ahead of rank 0. One that is, or is late, misses the appointment,
and its save is not there: saves only count where all ranks have theirs.
"""

from __future__ import annotations

import mmap
import os
import secrets

BYTES = 4096
AHEAD = 2  # steps
STEP, LAUNCH = 0, 1  # places in the page, numbers of eight bytes


class Appointment:
    """``path``: of the page, the same for all ranks of one launch and of no other. ``leads``: this is rank 0. Raises OSError where no page can be had."""

    def __init__(self, path: str, leads: bool) -> None:
        self.leads = leads
        handle = _made(path)
        try:
            self._words = memoryview(mmap.mmap(handle, BYTES)).cast("Q")
        finally:
            os.close(handle)

    @property
    def launch(self) -> int:
        """A number that these ranks have in common, and no others."""
        return int(self._words[LAUNCH])

    def agrees(self, wants: bool, steps: int) -> bool:
        """Whether all ranks save now, after so many steps. ``wants``: this one would."""
        if self.leads and wants and self._words[STEP] < steps:
            self._words[STEP] = steps + AHEAD
        return bool(self._words[STEP] == steps)


def _made(path: str) -> int:
    """An open page, whole from the moment on at which it has its name."""
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
