"""Ends a process when its parent ends."""

import ctypes
import signal
import sys

_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None  # before any fork


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent exits. Linux only.

    A child calls it before its program starts. A stopped trial would otherwise run for ever if flatout is
    killed, and SIGKILL of torchrun leaves every worker running (measured with torch 2.14)."""
    if _libc is not None:
        _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
