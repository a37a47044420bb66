"""What one process of this user may have: open files, processes, locked memory, address space."""

from __future__ import annotations

from flatout.diagnose.doctor.check import Answer, note, ok, problem, question, size, unseen, warning
from flatout.diagnose.doctor.graphics import gpu_is_here
from flatout.diagnose.doctor.processor import groups
from flatout.plan.sight import Sight
from flatout.probe.proc import Limit, limits

THEME = "limits"
FEW_FILES, FEW_PROCESSES = 4096, 1024
NEEDS = ["file /proc/self/limits"]


def _limit(sight: Sight, name: str) -> Limit | None:
    return limits(sight.text("/proc/self/limits")).get(name)


def _raise(letter: str, wanted: int, limit: Limit) -> str:
    """A shell raises its own soft limit up to the hard one; beyond that root must."""
    if limit.hard is None or limit.hard >= wanted:
        return f"ulimit -{letter} {wanted}"
    option = {"n": "nofile", "u": "nproc", "l": "memlock"}[letter]
    return f"echo '* - {option} {wanted}' | sudo tee /etc/security/limits.d/flatout.conf"


@question("FD080", THEME, NEEDS)
def open_files(sight: Sight) -> Answer:
    """Enough files may be open at once.

    Why it matters:
        Each tensor that a loader worker hands over is an open file in both processes. At the usual 1,024 several workers with many tensors
        a sample end with "Too many open files".
    How to mend it:
        `ulimit -n 65536` in the shell that starts the training; in a container `docker run --ulimit nofile=65536:65536`.
    """
    limit = _limit(sight, "open files")
    if limit is None:
        return unseen("/proc/self/limits does not tell the number of open files")
    if limit.soft is not None and limit.soft < 256:
        return problem(f"{limit.soft} files may be open: torch alone opens more than a hundred, and loader workers need many", _raise("n", 65536, limit))
    if limit.soft is not None and limit.soft < FEW_FILES:
        return warning(f"{limit.soft} files may be open (at most {limit.hard or 'any number'}): several loader workers need more", _raise("n", 65536, limit))
    return ok(f"{limit.soft or 'any number of'} files")


@question("FD081", THEME, NEEDS)
def processes(sight: Sight) -> Answer:
    """Enough processes and threads may be started.

    Why it matters:
        Threads count as processes here. Where the limit is met, torch ends with "can't start new thread" or a loader worker cannot be made.
    How to mend it:
        `ulimit -u 65536`; in a container `docker run --pids-limit -1`.
    """
    limit, held = _limit(sight, "processes"), groups(sight)
    if limit is None:
        return unseen("/proc/self/limits does not tell the number of processes")
    if held is None:
        return unseen(f"{limit.soft or 'any number of'} processes by ulimit; the control groups could not be looked at")
    if held.processes is not None and held.processes < FEW_PROCESSES:
        return warning(f"{held.processes} processes and threads by the control group's limit", "docker run --pids-limit -1 ...", held.files("pids"))
    if limit.soft is not None and limit.soft < FEW_PROCESSES:
        return warning(f"{limit.soft} processes and threads", _raise("u", 65536, limit))
    return ok(f"{limit.soft or 'any number of'} processes and threads" + (f", {held.processes} by the control group" if held.processes else ""))


@question("FD082", THEME, NEEDS)
def locked_memory(sight: Sight) -> Answer:
    """Memory may be locked.

    Why it matters:
        InfiniBand and GPUDirect register memory and lock it; with the usual 64 KiB or 8 MiB NCCL falls back to sockets or ends with "Cannot allocate memory".
        Pinned memory of CUDA is not counted here.
    How to mend it:
        `ulimit -l unlimited`; in a container `docker run --ulimit memlock=-1`.
    """
    limit = _limit(sight, "locked memory")
    if limit is None:
        return unseen("/proc/self/limits does not tell the locked memory")
    if limit.soft is None:
        return ok("memory may be locked without limit")
    if gpu_is_here(sight):
        return note(f"{size(limit.soft)} of memory may be locked: too little for InfiniBand between machines, no matter on one", "ulimit -l unlimited")
    return ok(f"{size(limit.soft)} may be locked; only InfiniBand needs more")


@question("FD083", THEME, NEEDS)
def address_space(sight: Sight) -> Answer:
    """The address space is not limited.

    Why it matters:
        CUDA reserves hundreds of GiB of addresses that it never uses. Under `ulimit -v` it cannot start: "out of memory" with everything free.
    How to mend it:
        `ulimit -v unlimited`.
    """
    found = limits(sight.text("/proc/self/limits"))
    limit, data = found.get("address space"), found.get("data size")
    if limit is None or data is None:
        return unseen("/proc/self/limits does not tell the address space")
    least = min((each for each in (limit.soft, data.soft) if each is not None), default=None)
    if least is None:
        return ok("no limit")
    letter = "v" if limit.soft is not None else "d"
    if gpu_is_here(sight):
        return problem(f"limited to {size(least)}: CUDA cannot reserve its addresses", f"ulimit -{letter} unlimited")
    return warning(f"limited to {size(least)}: threads and large tensors may be refused", f"ulimit -{letter} unlimited")


@question("FD084", THEME, NEEDS)
def core_dumps(sight: Sight) -> Answer:
    """A crash does not fill the disk with core dumps.

    Why it matters:
        A core dump of a training process is as large as its memory, and each loader worker writes its own.
    How to mend it:
        `ulimit -c 0`.
    """
    limit = _limit(sight, "core file size")
    if limit is None:
        return unseen("/proc/self/limits does not tell the size of core dumps")
    if limit.soft == 0:
        return ok("no core dumps")
    return note(f"a crash writes a core dump of {'any size' if limit.soft is None else f'up to {size(limit.soft)}'}", "ulimit -c 0")


QUESTIONS = (open_files, processes, locked_memory, address_space, core_dumps)
