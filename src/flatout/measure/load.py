"""What a measurement shares the machine with: cores that others keep busy, and memory that is left."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.measure.clock import cpu_seconds as process_time
from flatout.measure.clock import sleep

SPARE = 0.9  # of the free memory may be used; the rest is for what grows
CONTEXT_BYTES = 600 * 2**20  # of a CUDA context, beside what torch has reserved


def busy_cores(watch_s: float = 0.5) -> float | None:
    """How many cores other programs keep busy just now, seen over ``watch_s`` seconds; None where the kernel does not tell.

    Time taken by other guests of the same host counts as busy: this machine did not have it. Source: proc_stat(5).
    """
    try:
        before = _busy_ticks()
        sleep(watch_s)
        return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / watch_s
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Busy:
    """``cores`` that are busy just now, and the programs that use most of them: ``python (pid 123)``."""

    cores: float
    names: tuple[str, ...] = ()


def busy_programs(watch_s: float = 0.25, most: int = 2) -> Busy | None:
    """Who keeps the machine busy, seen over ``watch_s`` seconds; None where the kernel does not tell. This process does not count.

    Time taken by other guests of the same host has no name here, and counts.
    """
    import psutil  # here: a program that is measured needs none

    try:
        before, used = _busy_ticks(), _cpu_seconds(psutil)
        own = process_time()
        sleep(watch_s)
        cores = (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / watch_s - (process_time() - own) / watch_s
    except (OSError, ValueError):
        return None
    after = _cpu_seconds(psutil)
    shares = {pid: (spent - used[pid][1], name) for pid, (name, spent) in after.items() if pid in used}
    top = sorted(((share / watch_s, name, pid) for pid, (share, name) in shares.items()), reverse=True)[:most]
    return Busy(max(0.0, cores), tuple(f"{name} (pid {pid})" for share, name, pid in top if share >= 0.2))


def _cpu_seconds(psutil: Any) -> dict[int, tuple[str, float]]:
    """Name and processor seconds of each process but this one."""
    found = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.pid != os.getpid():
            found[process.pid] = process.info["name"] or "?", times.user + times.system
    return found


def _busy_ticks() -> int:
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9])
    return user + nice + system + irq + softirq + steal


def peak_bytes(torch: Any, device: Any) -> int:
    """The most that this process has held: on ``device`` where that is a CUDA device, else in memory."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copies_that_fit(torch: Any, device: Any, processes: int = 1) -> int:
    """How many programs like this one fit at once, this one among them: into the memory of ``device``, and into the machine's.

    ``processes`` are the like of this process that one program consists of (the ranks of this machine).
    """
    copies = 1 + int(SPARE * available_bytes() // (max(1, resident_bytes()) * processes))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        copies = min(copies, 1 + int(SPARE * free // (torch.cuda.max_memory_reserved(device) + CONTEXT_BYTES)))
    return copies


def available_bytes() -> int:
    """Memory that can be had without swapping. Source: proc_meminfo(5); a cgroup's limit where that is narrower."""
    try:
        kib = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 2**62  # nobody knows; as before, the machine must bear it
    available = kib * 1024
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
        return min(available, int(limit) - int(used)) if limit != "max" else available
    except (OSError, ValueError):
        return available


def resident_bytes(pid: int | str = "self") -> int:
    """Memory of a process that is in RAM; 1 where nobody tells. Source: proc_pid_statm(5)."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 1


def private_bytes(pid: int) -> int | None:
    """Memory of a process that it shares with nobody; None where nobody tells. Source: proc_pid_smaps_rollup(5)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))
    except (OSError, ValueError):
        return None
