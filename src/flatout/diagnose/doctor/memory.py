"""Checks of memory: the machine's, the container's, shared memory for workers, and replaced allocators."""

from __future__ import annotations

import re

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
from flatout.diagnose.doctor.packages import contained
from flatout.diagnose.doctor.processor import groups
from flatout.probe.proc import chosen, meminfo, mount_of, mounts, swaps
from flatout.probe.snapshot import NO_LIBRARY
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "memory"
SMALL_SHM = 512 * 2**20  # a batch of 256 images of 224 x 224 is 147 MiB, and each worker has two
DOCKER_SHM = 64 * 2**20
SMALL_MEMORY = 4 * 2**30


@machine_check("FD070", THEME, ["file /proc/meminfo"])
def memory_limit(snapshot: MachineSnapshot) -> CheckOutcome:
    """Enough memory is free within the container's limit.

    Why it matters:
        Libraries see the machine's memory. Beyond the control group's limit the kernel ends a process with
        SIGKILL, and Python prints no message.
    How to fix it:
        Give the container more memory with `docker run --memory 32g`, or use fewer loader workers.
    """
    seen, limit = meminfo(snapshot.text("/proc/meminfo")), groups(snapshot)
    total, available = seen.get("MemTotal"), seen.get("MemAvailable")
    if not total or available is None:
        return not_seen("/proc/meminfo does not contain the memory size")
    if limit is None:
        return not_seen(f"{size(total)} in the machine; the control groups could not be read")
    if limit.memory_bytes and limit.memory_bytes < total:
        left = limit.memory_bytes - (limit.used_bytes or 0)
        said = f"{size(limit.memory_bytes)} by the control group's limit ({size(max(left, 0))} unused), of {size(total)} in the machine"
        if limit.memory_bytes < SMALL_MEMORY or left < 0.1 * limit.memory_bytes:
            return warning(
                f"{said}: the kernel ends processes that need more",
                "docker run --memory 32g ...",
                limit.files("memory"),
            )
        return note(said, evidence=limit.files("memory"))
    if available < 0.1 * total:
        return warning(f"{size(available)} of {size(total)} are available", "ps aux --sort=-rss | head")
    return ok(f"{size(total)}, {size(available)} available, no limit of a control group")


@machine_check("FD071", THEME, ["file /proc/self/mountinfo"])
def shared_memory(snapshot: MachineSnapshot) -> CheckOutcome:
    """/dev/shm is large enough for loader workers.

    Why it matters:
        Workers pass their batches through /dev/shm. Docker gives it 64 MiB: a worker then dies with "bus
        error" or "unable to open shared memory object".
    How to fix it:
        Start the container with `--shm-size=8g` or `--ipc=host`. On a machine use `sudo mount -o
        remount,size=8g /dev/shm`.
    """
    mount = mount_of("/dev/shm", mounts(snapshot.text("/proc/self/mountinfo")))
    if mount is None:
        return not_seen("/proc/self/mountinfo does not list the file system of /dev/shm")
    disk = snapshot.disks.get("/dev/shm")
    if mount.point != "/dev/shm":
        return problem(
            f"/dev/shm is not a separate file system (it is on {mount.point}): loader workers cannot share memory",
            "sudo mount -t tmpfs -o size=8g tmpfs /dev/shm",
        )
    total = mount.size_bytes() or (disk.total_bytes if disk else None)
    if total is None:
        return not_seen("the size of /dev/shm could not be determined")
    fix = (
        "docker run --shm-size=8g ..."
        if contained(snapshot) or total <= DOCKER_SHM
        else "sudo mount -o remount,size=8g /dev/shm"
    )
    if total <= DOCKER_SHM:
        return problem(
            f"/dev/shm has {size(total)}, the default of a container: one batch of images fills it", fix
        )
    if total < SMALL_SHM:
        return warning(f"/dev/shm has {size(total)}: large batches or several workers fill it", fix)
    if disk is None:
        return not_seen(f"/dev/shm has {size(total)}; its free space could not be determined")
    if disk.free_bytes < min(SMALL_SHM, 0.2 * total):
        return warning(
            f"{size(disk.free_bytes)} of the {size(total)} of /dev/shm are free", "ls -lS /dev/shm | head"
        )
    return ok(f"/dev/shm has {size(total)}, {size(disk.free_bytes)} free")


@machine_check("FD072", THEME, ["file /proc/swaps", "file /proc/meminfo"])
def swap(snapshot: MachineSnapshot) -> CheckOutcome:
    """No memory is swapped out.

    Why it matters:
        A training run that is partly swapped out is a hundred times slower, and so are the programs after it.
    How to fix it:
        Free memory, then swap everything back in with `sudo swapoff -a && sudo swapon -a`.
    """
    found, seen = swaps(snapshot.text("/proc/swaps")), meminfo(snapshot.text("/proc/meminfo"))
    if found is None:
        return not_seen("/proc/swaps could not be parsed")
    used = sum(each[2] for each in found)
    total = seen.get("MemTotal")
    if not found:
        return ok("no swap")
    if total is None:
        return not_seen(f"{size(used)} are swapped out; the memory size could not be read")
    if used > 0.02 * total:
        return warning(f"{size(used)} are swapped out", "sudo swapoff -a && sudo swapon -a")
    return ok(f"{size(sum(each[1] for each in found))} of swap, {size(used)} used")


@machine_check("FD073", THEME, ["file /sys/kernel/mm/transparent_hugepage/enabled"])
def huge_pages(snapshot: MachineSnapshot) -> CheckOutcome:
    """Transparent huge pages are available on request.

    Why it matters:
        Large tensors in pages of 2 MiB need fewer address look-ups. With "never" no allocator can use them.
        `flatout tune` measures whether they help.
    How to fix it:
        `echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled`.
    """
    setting = chosen(snapshot.text("/sys/kernel/mm/transparent_hugepage/enabled"))
    if setting in ("always", "madvise"):
        return ok(f"transparent huge pages: {setting}")
    if setting == "never":
        return note(
            "transparent huge pages: never",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return not_seen("the setting of transparent huge pages could not be parsed")


@machine_check("FD074", THEME, ["environment"])
def allocator(snapshot: MachineSnapshot) -> CheckOutcome:
    """The variables of torch's allocator are valid.

    Why it matters:
        PYTORCH_CUDA_ALLOC_CONF is the old name of PYTORCH_ALLOC_CONF. With caching switched off for
        debugging, each allocation is a call into the driver.
    How to fix it:
        `export PYTORCH_ALLOC_CONF=expandable_segments:True`, and unset the old name.
    """
    if snapshot.variable("PYTORCH_NO_CUDA_MEMORY_CACHING") not in (None, "0"):
        return warning(
            "PYTORCH_NO_CUDA_MEMORY_CACHING is set: each allocation on the GPU is a call into the driver",
            "unset PYTORCH_NO_CUDA_MEMORY_CACHING",
        )
    new, old = snapshot.variable("PYTORCH_ALLOC_CONF"), snapshot.variable("PYTORCH_CUDA_ALLOC_CONF")
    if new and old and new != old:
        return warning(
            f"PYTORCH_ALLOC_CONF={new!r} and PYTORCH_CUDA_ALLOC_CONF={old!r} contradict each other",
            "unset PYTORCH_CUDA_ALLOC_CONF",
        )
    value = new or old
    if value and not re.fullmatch(
        r"\s*\w+\s*:\s*[^,:]+(\s*,\s*\w+\s*:\s*[^,:]+)*\s*", re.sub(r"\[[^\]]*\]", "list", value)
    ):
        return problem(
            f"PYTORCH_ALLOC_CONF={value!r} is not a list of name:value, and torch rejects it",
            "unset PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF",
        )
    if old and not new:
        return note(
            f"PYTORCH_CUDA_ALLOC_CONF={old!r}: this is the old name of PYTORCH_ALLOC_CONF",
            f"export PYTORCH_ALLOC_CONF={old}",
        )
    return ok(f"PYTORCH_ALLOC_CONF={new!r}" if new else "the allocator is torch's default")


@machine_check("FD075", THEME, ["environment", "preloads"])
def preloaded(snapshot: MachineSnapshot) -> CheckOutcome:
    """Every library of LD_PRELOAD exists.

    Why it matters:
        For a missing library the loader only prints a warning to standard error and continues without the
        intended allocator.
    How to fix it:
        `unset LD_PRELOAD`, or use the full path of the file.
    """
    missing = [path for path, there in (snapshot.preloads or {}).items() if not there]
    if missing:
        return warning(f"LD_PRELOAD names {missing[0]}, which does not exist", "unset LD_PRELOAD", missing)
    return (
        note(f"LD_PRELOAD={snapshot.variable('LD_PRELOAD')!r}", "unset LD_PRELOAD")
        if snapshot.preloads
        else ok("LD_PRELOAD is not set")
    )


@machine_check("FD076", THEME, ["environment", "libraries"])
def library_path(snapshot: MachineSnapshot) -> CheckOutcome:
    """LD_LIBRARY_PATH adds no other CUDA library.

    Why it matters:
        torch's wheels include their CUDA libraries and usually find them first. Extensions and other
        frameworks do not, and then one process mixes two versions.
    How to fix it:
        `unset LD_LIBRARY_PATH`.
    """
    held = {folder: names for folder, names in (snapshot.libraries or {}).items() if names}
    broken = [
        f"{folder}/{name.removesuffix(NO_LIBRARY)}"
        for folder, names in held.items()
        for name in names
        if name.endswith(NO_LIBRARY)
    ]
    if broken:
        return warning(
            f"LD_LIBRARY_PATH leads to {broken[0]}, which is not a complete library: loading it fails",
            "unset LD_LIBRARY_PATH",
            broken,
        )
    if held:
        folder, names = next(iter(held.items()))
        return note(
            f"LD_LIBRARY_PATH leads to {folder} with {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}, before torch's own",
            "unset LD_LIBRARY_PATH",
            [f"{where}: {', '.join(found)}" for where, found in held.items()],
        )
    return ok(
        "LD_LIBRARY_PATH leads to no CUDA library"
        if snapshot.variable("LD_LIBRARY_PATH")
        else "LD_LIBRARY_PATH is not set"
    )


@machine_check("FD077", THEME, ["file /proc/sys/vm/overcommit_memory"])
def overcommit(snapshot: MachineSnapshot) -> CheckOutcome:
    """The kernel allows a large process to fork.

    Why it matters:
        With vm.overcommit_memory=2, starting a loader worker needs as much free memory as its parent uses:
        "Cannot allocate memory".
    How to fix it:
        `sudo sysctl vm.overcommit_memory=0`.
    """
    value = (snapshot.text("/proc/sys/vm/overcommit_memory") or "").strip()
    if value == "2":
        return warning(
            "vm.overcommit_memory is 2: loader workers of a large process cannot be started",
            "sudo sysctl vm.overcommit_memory=0",
        )
    return (
        ok(f"vm.overcommit_memory is {value}")
        if value in ("0", "1")
        else not_seen("vm.overcommit_memory could not be parsed")
    )


QUESTIONS = (memory_limit, shared_memory, swap, huge_pages, allocator, preloaded, library_path, overcommit)
