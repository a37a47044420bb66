"""Checks of the operating system: C library, kernel, containers and WSL."""

from __future__ import annotations

import re

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    machine_check,
    not_seen,
    note,
    ok,
    problem,
    version,
    warning,
)
from flatout.diagnose.doctor.packages import upgrade
from flatout.diagnose.doctor.versions import versions
from flatout.probe.proc import os_release
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "system"
KERNEL_MIN, KERNEL_OLD = (
    (5, 5),
    (4,),
)  # Hugging Face Accelerate warns below 5.5; distributions keep 4.18 alive with later patches


@machine_check("FD050", THEME, ["python libc"])
def glibc(snapshot: MachineSnapshot) -> CheckOutcome:
    """The C library is new enough for torch's wheels.

    Why it matters:
        Wheels of torch since 2.7 are built for glibc 2.28. On CentOS 7 (2.17) or Ubuntu 18.04 (2.27) pip
        finds none of them, or installs a wheel that fails with "GLIBC_2.28 not found".
    How to fix it:
        Use a container with its own glibc: `docker run --rm -it -v "$PWD":/work -w /work pytorch/pytorch
        bash`. Do not replace the system's glibc.
    """
    kind, text = [*map(str, snapshot.python["libc"]), "", ""][:2]
    if kind != "glibc":
        if kind:
            return not_seen(f"the C library is {kind} {text}")
        return warning(
            "the C library is not glibc (Alpine's musl?): there are no wheels of torch for it",
            'docker run --rm -it -v "$PWD":/work -w /work pytorch/pytorch bash',
        )
    here = version(text)
    if here is None:
        return not_seen(f"{text!r} is not a version of glibc")
    table = versions()
    release = table.release(snapshot.distribution("torch")) or table.releases[0]
    if release.glibc_min is None:
        return note(
            f"glibc {text}; flatout's version table does not list what wheels of torch {release.torch} need"
        )
    if here < release.glibc_min:
        latest = next((r for r in table.releases if r.glibc_min and r.glibc_min <= here), None)
        last = f"; the last torch for it is {latest.torch}, which flatout does not support" if latest else ""
        return problem(
            f"glibc {text}; wheels of torch {release.torch} need {dotted(release.glibc_min)}{last}",
            'docker run --rm -it -v "$PWD":/work -w /work pytorch/pytorch bash',
        )
    return ok(f"glibc {text}; wheels of torch {release.torch} need {dotted(release.glibc_min)}")


@machine_check("FD051", THEME, ["file /proc/version"])
def kernel(snapshot: MachineSnapshot) -> CheckOutcome:
    """The kernel is recent enough.

    Why it matters:
        Multi-process training is known to hang on kernels below 5.5. CentOS 7's 3.10 also lacks features that
        containers and drivers need.
    How to fix it:
        Update the system with `sudo apt-get dist-upgrade`, or move to a maintained release.
    """
    text = snapshot.text("/proc/version") or ""
    found = re.match(r"Linux version (\d+\.\d+(?:\.\d+)?)", text)
    name = os_release(snapshot.text("/etc/os-release")).get("PRETTY_NAME", "an unnamed system")
    if not found:
        return not_seen("/proc/version does not name the kernel")
    if (version(found[1]) or ()) < KERNEL_MIN:
        say = warning if (version(found[1]) or ()) < KERNEL_OLD else note
        return say(
            f"{name}, kernel {found[1]}; {dotted(KERNEL_MIN)} and newer are known to be safe",
            upgrade(snapshot),
        )
    return ok(f"{name}, kernel {found[1]}")


@machine_check("FD052", THEME, ["file /proc/version"])
def windows_subsystem(snapshot: MachineSnapshot) -> CheckOutcome:
    """WSL is set up for speed.

    Why it matters:
        Under WSL, Windows disks (/mnt/c) are several times slower than the Linux disk, memory is limited to
        half of the machine's, and the driver is the Windows driver.
    How to fix it:
        Keep data and code below the Linux home folder: `cp -r /mnt/c/data ~/data`.
    """
    text = (snapshot.text("/proc/version") or "").lower()
    if not text.startswith("linux version"):
        return not_seen("/proc/version does not name the kernel")
    if "microsoft" not in text:
        return ok("not WSL")
    if re.match(r"/mnt/[a-z](/|$)", snapshot.working_folder):
        return warning(
            f"WSL, and {snapshot.working_folder} is on a Windows disk: reading it is slow",
            f"cp -r {snapshot.working_folder} ~/",
        )
    return note("WSL: the driver is the Windows driver, and .wslconfig limits memory and cores")


@machine_check("FD053", THEME, ["file /proc/self/mountinfo"])
def container(snapshot: MachineSnapshot) -> CheckOutcome:
    """Reports a container, whose limits differ from the machine's.

    Why it matters:
        In a container, libraries see the machine's cores and memory, not the container's share. /dev/shm is
        64 MiB by default. The checks of the processor and of memory use the container's own limits.
    How to fix it:
        Nothing to fix. The limits are options of `docker run` (--cpus, --memory, --shm-size, --ulimit).
    """
    signs = [
        name
        for name, path in (("Docker", "/.dockerenv"), ("Podman", "/run/.containerenv"))
        if snapshot.text(path) is not None
    ]
    signs += ["Kubernetes"] if snapshot.variable("KUBERNETES_SERVICE_HOST") else []
    signs += [f"container={snapshot.variable('container')}"] if snapshot.variable("container") else []
    if signs:
        return note(f"this is a container ({', '.join(signs)})")
    text = snapshot.text("/proc/self/mountinfo") or ""
    root = re.search(r"^\d+ \d+ \S+ \S+ / .* - (\S+) ", text, re.MULTILINE)
    if root is None:
        return not_seen("/proc/self/mountinfo does not name the root file system")
    if root[1] == "overlay":
        return note("the root file system is an overlay: this is a container")
    return ok("no sign of a container")


QUESTIONS = (glibc, kernel, windows_subsystem, container)
