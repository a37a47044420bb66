"""Tells the user once per run which device the program gets."""

from __future__ import annotations

import atexit
import os

from flatout.agent.bootstrap import say
from flatout.job.claims import speaks_first
from flatout.job.rank_environment import rank_number


def tell_first(sentence: str) -> None:
    """Print a line once for all processes of a run that live at the same time."""
    claim = f"{os.environ.get('FLATOUT_CRASH_REPORTS', os.devnull)}.device"
    if rank_number() == 0 and "FLATOUT_CRASH_REPORTS" in os.environ and speaks_first(claim):
        say(sentence)
        atexit.register(_remove, f"{claim}.reported", os.getpid())


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid and os.path.exists(path):
        os.unlink(path)
