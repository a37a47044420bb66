"""Tells the user once per run which device the program gets."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from flatout.agent.bootstrap import say
from flatout.job.claims import speaks_first
from flatout.job.rank_environment import this_rank

if TYPE_CHECKING:
    pass


def tell_first(sentence: str) -> None:
    """Print a line once for all processes of a run that live at the same time."""
    claim = f"{os.environ.get('FLATOUT_CRASH_REPORTS', os.devnull)}.device"
    here = this_rank()  # of several ranks, one prints
    rank = here.rank if here is not None else int(os.environ.get("RANK") or 0)
    if rank == 0 and "FLATOUT_CRASH_REPORTS" in os.environ and speaks_first(claim):
        say(sentence)
        atexit.register(_remove, f"{claim}.reported", os.getpid())


def _remove(path: str, pid: int) -> None:
    if os.getpid() == pid and os.path.exists(path):
        os.unlink(path)
