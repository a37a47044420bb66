"""Checks of what this process may use: cores, memory, shared memory, open files, processes, addresses."""

import re

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    machine_check,
    not_checked,
    note,
    ok,
    problem,
    warning,
)
from flatout.diagnose.doctor.system import in_container
from flatout.probe.cgroup import CgroupLimits, group
from flatout.probe.proc import limits, meminfo, mount_of, mounts, numbers, status
from flatout.schema.machine_snapshot import MachineSnapshot
from flatout.schema.sizes import size

THEME = "limits"
MIN_OPEN_FILES = 4096
MIN_SHM_BYTES = 512 * 2**20  # a batch of 256 images of 224 x 224 is 147 MiB, and each worker has two
DOCKER_SHM_BYTES = 64 * 2**20
MIN_MEMORY_BYTES = 4 * 2**30


def _allowed_cores(snapshot: MachineSnapshot) -> list[int] | None:
    return numbers(status(snapshot.text("/proc/self/status"), "Cpus_allowed_list"))


def _cgroup(snapshot: MachineSnapshot) -> CgroupLimits | None:
    """The control groups of this process; None if they could not be read."""
    if snapshot.text("/proc/self/cgroup") is None or snapshot.text("/proc/self/mountinfo") is None:
        return None
    return group(snapshot.files.get)


def _cores(snapshot: MachineSnapshot) -> int | None:
    """The number of cores for training, within affinity and quota."""
    allowed, limit = _allowed_cores(snapshot), _cgroup(snapshot)
    if allowed is None:
        return None
    return max(1, min(len(allowed), round(limit.cores))) if limit and limit.cores else len(allowed)


def _threads(snapshot: MachineSnapshot) -> int | None:
    """The number of threads that torch uses per operation; if unknown, the value of OMP_NUM_THREADS."""
    threads = (snapshot.torch.get("host") or {}).get("threads")
    variable = snapshot.variable("OMP_NUM_THREADS") or ""
    return threads if isinstance(threads, int) else int(variable) if variable.isdigit() else None


@machine_check("FD060", THEME, ["file /proc/self/status", "file /sys/devices/system/cpu/online"])
def core_limit(snapshot: MachineSnapshot) -> CheckOutcome:
    """The cores that libraries count are available to this process.

    Libraries count the cores they see. Under a quota of two cores on a machine with 64, they start 64
    threads, and the kernel stops all of them for the rest of each period. That is slower than two threads.
    """
    online = numbers(snapshot.text("/sys/devices/system/cpu/online"))
    allowed, limit = _allowed_cores(snapshot), _cgroup(snapshot)
    if online is None or allowed is None:
        return not_checked("the number of cores could not be read")
    if limit is None:
        return not_checked(f"{len(allowed)} cores by affinity; the control groups could not be read")
    quota = f", {limit.cores:g} by quota" if limit.cores else ""
    cores = f"cores: {len(online)} online, {len(allowed)} by affinity{quota}"
    if limit.cores and limit.cores < len(allowed) - 0.5:
        usable, threads = max(1, int(limit.cores)), _threads(snapshot)
        if threads is None:
            return not_checked(f"{cores}; the number of torch's threads could not be determined")
        if threads <= usable + 1:
            return ok(f"{cores}; torch uses {threads} thread(s), which fits")
        return warning(
            f"{cores}: torch uses {threads} threads and gets {limit.cores:g} cores",
            f"export OMP_NUM_THREADS={usable}",
            limit.files("cpu"),
        )
    if len(allowed) < len(online):
        return note(f"{cores}: this process is bound to part of the machine", "taskset -pc $$")
    return ok(cores)


@machine_check("FD064", THEME, ["environment", "file /proc/self/status"])
def threads(snapshot: MachineSnapshot) -> CheckOutcome:
    """The thread variables fit the number of cores.

    More threads than cores waste time in context switches. A single thread leaves the other cores idle.
    Launchers set OMP_NUM_THREADS=1 by default.
    """
    cores = _cores(snapshot)
    if cores is None:
        return not_checked("the number of cores for this process could not be read")
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = snapshot.variable(name)
        if value is None:
            continue
        if not re.fullmatch(r"[1-9]\d*(,\d+)*", value):
            return warning(f"{name}={value}: not a number of threads", f"unset {name}")
        if int(value.split(",")[0]) > cores:
            return warning(
                f"{name}={value} for {cores} core(s): threads compete for cores", f"export {name}={cores}"
            )
    variable = snapshot.variable("OMP_NUM_THREADS")
    if variable == "1" and cores > 1:
        return note(
            f"OMP_NUM_THREADS=1 with {cores} cores: torch computes with one thread, which suits small models but not large ones",
            "flatout tune python train.py",
        )
    return ok(
        f"{f'OMP_NUM_THREADS={variable}' if variable else 'OMP_NUM_THREADS is not set'}; {cores} core(s)"
    )


@machine_check("FD066", THEME, ["file /proc/loadavg", "file /proc/self/status"])
def load(snapshot: MachineSnapshot) -> CheckOutcome:
    """Other programs leave the cores to training.

    Cores used by other programs are missing for training, and every measured time varies with them.
    """
    average, cores = re.match(r"(\d+\.\d+) ", snapshot.text("/proc/loadavg") or ""), _cores(snapshot)
    if not average or cores is None:
        return not_checked("the load could not be read")
    # The load is that of the whole machine, even if this process may use only part of it.
    count = len(numbers(snapshot.text("/sys/devices/system/cpu/online")) or ()) or cores
    if float(average[1]) > 0.5 * count + 1:
        return warning(
            f"other programs are busy (load {float(average[1]):.1f} on {count} cores): timings will be unreliable",
            "top -o %CPU",
        )
    return ok(f"a load of {average[1]} on {count} core(s)")


@machine_check("FD070", THEME, ["file /proc/meminfo"])
def memory_limit(snapshot: MachineSnapshot) -> CheckOutcome:
    """Enough memory is free within the container's limit.

    Libraries see the machine's memory. Beyond the control group's limit the kernel ends a process with
    SIGKILL, and Python prints no message.
    """
    memory, limit = meminfo(snapshot.text("/proc/meminfo")), _cgroup(snapshot)
    total, available = memory.get("MemTotal"), memory.get("MemAvailable")
    if not total or available is None:
        return not_checked("/proc/meminfo does not contain the memory size")
    if limit is None:
        return not_checked(f"{size(total)} in the machine; the control groups could not be read")
    if limit.memory_bytes and limit.memory_bytes < total:
        unused = limit.memory_bytes - (limit.used_bytes or 0)
        amount = f"{size(limit.memory_bytes)} by the control group's limit ({size(max(unused, 0))} unused), of {size(total)} in the machine"
        if limit.memory_bytes < MIN_MEMORY_BYTES or unused < 0.1 * limit.memory_bytes:
            return warning(
                f"{amount}: the kernel ends processes that need more",
                "docker run --memory 32g ...",
                limit.files("memory"),
            )
        return note(amount, evidence=limit.files("memory"))
    if available < 0.1 * total:
        return warning(f"{size(available)} of {size(total)} are available", "ps aux --sort=-rss | head")
    return ok(f"{size(total)}, {size(available)} available, no limit of a control group")


@machine_check("FD071", THEME, ["file /proc/self/mountinfo"])
def shared_memory(snapshot: MachineSnapshot) -> CheckOutcome:
    """/dev/shm is large enough for loader workers.

    Workers pass their batches through /dev/shm. Docker gives it 64 MiB: a worker then dies with "bus error"
    or "unable to open shared memory object".
    """
    mount = mount_of("/dev/shm", mounts(snapshot.text("/proc/self/mountinfo")))
    if mount is None:
        return not_checked("/proc/self/mountinfo does not list the file system of /dev/shm")
    disk = snapshot.disks.get("/dev/shm")
    if mount.point != "/dev/shm":
        return problem(
            f"/dev/shm is not a separate file system (it is on {mount.point}): loader workers cannot share memory",
            "sudo mount -t tmpfs -o size=8g tmpfs /dev/shm",
        )
    total = mount.size_bytes() or (disk.total_bytes if disk else None)
    if total is None:
        return not_checked("the size of /dev/shm could not be determined")
    fix = (
        "docker run --shm-size=8g ..."
        if in_container(snapshot) or total <= DOCKER_SHM_BYTES
        else "sudo mount -o remount,size=8g /dev/shm"
    )
    if total <= DOCKER_SHM_BYTES:
        return problem(
            f"/dev/shm has {size(total)}, the default of a container: one batch of images fills it", fix
        )
    if total < MIN_SHM_BYTES:
        return warning(f"/dev/shm has {size(total)}: large batches or several workers fill it", fix)
    if disk is None:
        return not_checked(f"/dev/shm has {size(total)}; its free space could not be determined")
    if disk.free_bytes < min(MIN_SHM_BYTES, 0.2 * total):
        return warning(
            f"{size(disk.free_bytes)} of the {size(total)} of /dev/shm are free", "ls -lS /dev/shm | head"
        )
    return ok(f"/dev/shm has {size(total)}, {size(disk.free_bytes)} free")


@machine_check("FD080", THEME, ["file /proc/self/limits"])
def open_files(snapshot: MachineSnapshot) -> CheckOutcome:
    """The limit of open files is high enough.

    Each tensor that a loader worker passes on is an open file in both processes. At the usual limit of 1,024,
    several workers with many tensors per sample end with "Too many open files".
    """
    limit = limits(snapshot.text("/proc/self/limits")).get("open files")
    if limit is None:
        return not_checked("/proc/self/limits does not contain the number of open files")
    if limit.soft is None or limit.soft >= MIN_OPEN_FILES:
        return ok(f"{limit.soft or 'any number of'} files")
    fix = (
        "ulimit -n 65536"
        if limit.hard is None or limit.hard >= 65536
        else "echo '* - nofile 65536' | sudo tee /etc/security/limits.d/flatout.conf"
    )
    if limit.soft < 256:
        return problem(
            f"{limit.soft} files may be open: torch alone opens more than a hundred, and loader workers need many more",
            fix,
        )
    return warning(
        f"{limit.soft} files may be open (hard limit: {limit.hard or 'none'}): several loader workers need more",
        fix,
    )
