"""Load of the machine: cores that other processes use, and free memory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from flatout.measure.clock import cpu_seconds as process_time
from flatout.measure.clock import sleep

if TYPE_CHECKING:
    from torch import device as Device

USABLE_SHARE = 0.9  # of the free memory; the rest is a reserve for growth
CUDA_CONTEXT_BYTES = 600 * 2**20  # in addition to what torch has reserved


def busy_cores(sample_s: float = 0.5) -> float | None:
    """How many cores are busy, sampled over ``sample_s`` seconds.

    Time taken by other guests of the host counts as busy, because this machine did not have it. The result is
    None if the kernel does not report it. Source: proc_stat(5).
    """
    try:
        ticks_before = _busy_ticks()
        sleep(sample_s)
        return (_busy_ticks() - ticks_before) / os.sysconf("SC_CLK_TCK") / sample_s
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class MachineLoad:
    """``cores`` that are busy, and the programs that use most of them: ``python (pid 123)``."""

    cores: float
    names: tuple[str, ...] = ()


def machine_load(sample_s: float) -> MachineLoad | None:
    """The programs that load the machine, sampled over ``sample_s`` seconds.

    The result is None if the kernel does not report it. This process does not count. Time taken by other
    guests of the host counts, without a name.
    """
    import psutil  # imported here, because a measured program does not need it

    try:
        ticks_before, spent_before = _busy_ticks(), _cpu_seconds(psutil)
        own_before_s = process_time()
        sleep(sample_s)
        own_s = process_time() - own_before_s
        cores = ((_busy_ticks() - ticks_before) / os.sysconf("SC_CLK_TCK") - own_s) / sample_s
    except (OSError, ValueError):
        return None
    after = _cpu_seconds(psutil)
    shares = {
        pid: (spent - spent_before[pid][1], name)
        for pid, (name, spent) in after.items()
        if pid in spent_before
    }
    top = sorted(((share / sample_s, name, pid) for pid, (share, name) in shares.items()), reverse=True)[:2]
    return MachineLoad(
        max(0.0, cores), tuple(f"{name} (pid {pid})" for share, name, pid in top if share >= 0.2)
    )


def _cpu_seconds(psutil: ModuleType) -> dict[int, tuple[str, float]]:
    processes = {}
    for process in psutil.process_iter(["name", "cpu_times"]):
        times = process.info["cpu_times"]
        if times is not None and process.pid != os.getpid():
            processes[process.pid] = process.info["name"] or "?", times.user + times.system
    return processes


def _busy_ticks() -> int:
    """Of the cores that this process may use."""
    lines, ticks = Path("/proc/stat").read_text(encoding="ascii").splitlines(), 0
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    for line in lines:
        if line.split(" ", 1)[0] in names:
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, line.split()[1:9])
            ticks += user + nice + system + irq + softirq + steal
    return ticks


def peak_bytes(torch: ModuleType, device: Device) -> int:
    """The peak memory of this process: on ``device`` if it is a CUDA device, else in RAM."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def copies_that_fit(torch: ModuleType, device: Device, processes: int = 1) -> int:
    """How many programs like this one fit at once, including this one: into ``device`` and into RAM.

    ``processes`` is the number of processes like this one that a program has (the ranks of this machine).
    """
    copies = 1 + int(USABLE_SHARE * available_bytes() // (max(1, resident_bytes()) * processes))
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        copies = min(
            copies,
            1 + int(USABLE_SHARE * free // (torch.cuda.max_memory_reserved(device) + CUDA_CONTEXT_BYTES)),
        )
    return copies


def available_bytes() -> int:
    """The memory available without swapping.

    Source: proc_meminfo(5), or a cgroup's limit if that is lower.
    """
    try:
        kib = next(
            int(line.split()[1])
            for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            if line.startswith("MemAvailable:")
        )
    except (OSError, StopIteration):
        return 2**62  # unknown: assume no limit
    available = kib * 1024
    try:
        group = Path("/sys/fs/cgroup")
        limit, used = (
            (group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current")
        )
        return min(available, int(limit) - int(used)) if limit != "max" else available
    except (OSError, ValueError):
        return available


def resident_bytes() -> int:
    """The memory of this process in RAM, or 1 if it is unknown. Source: proc_pid_statm(5)."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
            "SC_PAGE_SIZE"
        )
    except (OSError, ValueError):
        return 1


def private_bytes(pid: int) -> int | None:
    """The private memory of a process, or None if it is unknown. Source: proc_pid_smaps_rollup(5)."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        return 1024 * sum(
            int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))
        )
    except (OSError, ValueError):
        return None
