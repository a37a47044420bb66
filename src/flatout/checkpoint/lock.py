"""Let only one process write into a folder at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from pathlib import Path

from flatout.checkpoint.disk import PRIVATE_FILE
from flatout.job.streams import avoid_closed_streams
from flatout.schema.errors import StorageError

_pids_of_locks: dict[
    str, int
] = {}  # by this process: the kernel would grant it its own lock twice. A child does not hold its parent's locks


class Lock:
    """Held until ``release`` or the end of the process, however it ends. Children do not inherit it.

    The file stays and names its last holder. This is the kernel's lock that works over NFS and that loader
    workers do not inherit. Its drawback: it is lost when this process opens and closes the file again for any
    reason.
    """

    @avoid_closed_streams()
    def __init__(self, path: Path) -> None:
        """Raises StorageError if another process holds it, OSError if the file cannot be written."""
        self.path, self._name = path, os.path.realpath(path)
        if _pids_of_locks.get(self._name) == os.getpid():
            raise StorageError(
                f"this process already writes checkpoints in {path.parent}. Use a separate folder for each training."
            )
        self._handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
        try:
            os.fchmod(self._handle, PRIVATE_FILE)
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._write_holder()
        except OSError as error:
            holder = os.pread(self._handle, 200, 0).decode(errors="replace")
            os.close(self._handle)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise StorageError(
                    f"another process writes checkpoints in {path.parent} ({_holder_name(holder)}). Wait for it, end it, or use another folder for "
                    "this training."
                ) from None
            raise
        _pids_of_locks[self._name] = os.getpid()
        self._owner = os.getpid()

    def _write_holder(self) -> None:
        try:
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode(), 0)
        except OSError:
            pass  # a full disk: the lock holds, but its holder has no name

    @property
    def is_valid(self) -> bool:
        """Whether the locked file is still the one that other processes find."""
        try:
            return self._handle >= 0 and os.path.samestat(
                os.fstat(self._handle), os.stat(self.path, follow_symlinks=False)
            )
        except OSError:
            return False

    def release(self) -> None:
        if self._handle >= 0 and os.getpid() == self._owner:
            os.close(self._handle)
            _pids_of_locks.pop(self._name, None)
        self._handle = -1


def _holder_name(text: str) -> str:
    try:
        metadata = json.loads(text)
        return f"process {int(metadata['pid'])} on {str(metadata['host'])[:64]!r}"
    except (ValueError, KeyError, TypeError):
        return "of unknown identity"
