"""Checks of the limits of one process: open files, processes, locked memory, address space."""

from __future__ import annotations

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    machine_check,
    not_seen,
    note,
    ok,
    problem,
    size,
    warning,
)
from flatout.diagnose.doctor.nvidia_smi import gpu_is_here
from flatout.diagnose.doctor.processor import groups
from flatout.probe.proc import Limit, limits
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "limits"
FEW_FILES, FEW_PROCESSES = 4096, 1024
NEEDS = ["file /proc/self/limits"]


def _limit(snapshot: MachineSnapshot, name: str) -> Limit | None:
    return limits(snapshot.text("/proc/self/limits")).get(name)


def _raise(letter: str, wanted: int, limit: Limit) -> str:
    """The command that raises a limit. Above the hard limit it needs root."""
    if limit.hard is None or limit.hard >= wanted:
        return f"ulimit -{letter} {wanted}"
    option = {"n": "nofile", "u": "nproc", "l": "memlock"}[letter]
    return f"echo '* - {option} {wanted}' | sudo tee /etc/security/limits.d/flatout.conf"


@machine_check("FD080", THEME, NEEDS)
def open_files(snapshot: MachineSnapshot) -> CheckOutcome:
    """The limit of open files is high enough.

    Why it matters:
        Each tensor that a loader worker passes on is an open file in both processes. At the usual limit of
        1,024, several workers with many tensors per sample end with "Too many open files".
    How to fix it:
        `ulimit -n 65536` in the shell that starts the training; in a container `docker run --ulimit
        nofile=65536:65536`.
    """
    limit = _limit(snapshot, "open files")
    if limit is None:
        return not_seen("/proc/self/limits does not contain the number of open files")
    if limit.soft is not None and limit.soft < 256:
        return problem(
            f"{limit.soft} files may be open: torch alone opens more than a hundred, and loader workers need many more",
            _raise("n", 65536, limit),
        )
    if limit.soft is not None and limit.soft < FEW_FILES:
        return warning(
            f"{limit.soft} files may be open (hard limit: {limit.hard or 'none'}): several loader workers need more",
            _raise("n", 65536, limit),
        )
    return ok(f"{limit.soft or 'any number of'} files")


@machine_check("FD081", THEME, NEEDS)
def processes(snapshot: MachineSnapshot) -> CheckOutcome:
    """The limit of processes and threads is high enough.

    Why it matters:
        Threads count as processes here. At the limit, torch ends with "can't start new thread" or a loader
        worker cannot start.
    How to fix it:
        `ulimit -u 65536`; in a container `docker run --pids-limit -1`.
    """
    limit, held = _limit(snapshot, "processes"), groups(snapshot)
    if limit is None:
        return not_seen("/proc/self/limits does not contain the number of processes")
    if held is None:
        return not_seen(
            f"{limit.soft or 'any number of'} processes by ulimit; the control groups could not be read"
        )
    if held.processes is not None and held.processes < FEW_PROCESSES:
        return warning(
            f"{held.processes} processes and threads by the control group's limit",
            "docker run --pids-limit -1 ...",
            held.files("pids"),
        )
    if limit.soft is not None and limit.soft < FEW_PROCESSES:
        return warning(f"{limit.soft} processes and threads", _raise("u", 65536, limit))
    return ok(
        f"{limit.soft or 'any number of'} processes and threads"
        + (f", {held.processes} by the control group" if held.processes else "")
    )


@machine_check("FD082", THEME, NEEDS)
def locked_memory(snapshot: MachineSnapshot) -> CheckOutcome:
    """Locking memory is allowed.

    Why it matters:
        InfiniBand and GPUDirect register memory and lock it. With the usual 64 KiB or 8 MiB, NCCL falls back
        to sockets or ends with "Cannot allocate memory". CUDA's pinned memory does not count here.
    How to fix it:
        `ulimit -l unlimited`; in a container `docker run --ulimit memlock=-1`.
    """
    limit = _limit(snapshot, "locked memory")
    if limit is None:
        return not_seen("/proc/self/limits does not contain the locked memory")
    if limit.soft is None:
        return ok("memory may be locked without limit")
    if gpu_is_here(snapshot):
        return note(
            f"{size(limit.soft)} of memory may be locked: too little for InfiniBand between machines, irrelevant on one",
            "ulimit -l unlimited",
        )
    return ok(f"{size(limit.soft)} may be locked; only InfiniBand needs more")


@machine_check("FD083", THEME, NEEDS)
def address_space(snapshot: MachineSnapshot) -> CheckOutcome:
    """The address space is not limited.

    Why it matters:
        CUDA reserves hundreds of GiB of addresses that it never uses. Under `ulimit -v` it cannot start: it
        reports "out of memory" although memory is free.
    How to fix it:
        `ulimit -v unlimited`.
    """
    found = limits(snapshot.text("/proc/self/limits"))
    limit, data = found.get("address space"), found.get("data size")
    if limit is None or data is None:
        return not_seen("/proc/self/limits does not contain the address space")
    least = min((each for each in (limit.soft, data.soft) if each is not None), default=None)
    if least is None:
        return ok("no limit")
    letter = "v" if limit.soft is not None else "d"
    if gpu_is_here(snapshot):
        return problem(
            f"limited to {size(least)}: CUDA cannot reserve its addresses", f"ulimit -{letter} unlimited"
        )
    return warning(
        f"limited to {size(least)}: starting threads and allocating large tensors may fail",
        f"ulimit -{letter} unlimited",
    )


@machine_check("FD084", THEME, NEEDS)
def core_dumps(snapshot: MachineSnapshot) -> CheckOutcome:
    """A crash does not fill the disk with core dumps.

    Why it matters:
        A core dump of a training process is as large as its memory, and each loader worker writes its own.
    How to fix it:
        `ulimit -c 0`.
    """
    limit = _limit(snapshot, "core file size")
    if limit is None:
        return not_seen("/proc/self/limits does not contain the size of core dumps")
    if limit.soft == 0:
        return ok("no core dumps")
    return note(
        f"a crash writes a core dump of {'any size' if limit.soft is None else f'up to {size(limit.soft)}'}",
        "ulimit -c 0",
    )


QUESTIONS = (open_files, processes, locked_memory, address_space, core_dumps)
