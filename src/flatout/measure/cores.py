"""Runs the blocks of two programs on the same core, one after the other.

On shared machines each core has its own disturbance by other tenants. A program with one busy thread mostly
stays on one core, so two of them would see different ones. Linux only; elsewhere nothing moves.
"""

import os
from contextlib import suppress
from pathlib import Path

PROCESSOR_FIELD = 36  # of the fields of /proc/*/stat behind the name, counted from 0. Source: proc(5)


def usable_cores() -> int:
    """The number of usable cores, ignoring cgroup quotas (``probe.machine`` reads those)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def current_core() -> int | None:
    """The core on which the calling thread runs."""
    try:
        text = Path("/proc/thread-self/stat").read_text(encoding="ascii", errors="replace")
        return int(text.rpartition(")")[2].split()[PROCESSOR_FIELD])
    except (OSError, ValueError, IndexError):
        return None


def move_to(core: int) -> None:
    """Move the calling thread to a core; afterwards the system may move it again, as before.

    It stays where it is if it may not run there, is bound to one core, or would be further from its memory.
    """
    current = current_core()
    if not hasattr(os, "sched_setaffinity") or current is None or current == core:
        return
    allowed = os.sched_getaffinity(0)
    if core not in allowed or _numa_node(core) != _numa_node(current):
        return
    with suppress(OSError):  # the system has just taken that core away
        os.sched_setaffinity(0, {core})
    os.sched_setaffinity(0, allowed)


def _numa_node(core: int) -> str:
    return next((path.name for path in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node*")), "")
