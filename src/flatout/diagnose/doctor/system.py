"""Checks of the system: the C library, the compiler, disks, and variables left over from debugging."""

import re

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    machine_check,
    not_checked,
    note,
    ok,
    problem,
    version,
    warning,
)
from flatout.diagnose.doctor.versions import versions
from flatout.probe.proc import os_release
from flatout.schema.machine_snapshot import MachineSnapshot
from flatout.schema.sizes import size

MANAGERS = {
    "debian": "apt-get",
    "ubuntu": "apt-get",
    "fedora": "dnf",
    "rhel": "dnf",
    "centos": "dnf",
    "suse": "zypper",
    "arch": "pacman",
    "alpine": "apk",
}


def manager(snapshot: MachineSnapshot) -> str:
    """The package manager; apt-get if unknown, because most containers are Debian."""
    release = os_release(snapshot.text("/etc/os-release"))
    for name in (release.get("ID", ""), *release.get("ID_LIKE", "").split()):
        if name in MANAGERS:
            return "yum" if name == "centos" and release.get("VERSION_ID") == "7" else MANAGERS[name]
    return "apt-get"


def install_command(snapshot: MachineSnapshot, debian: str, fedora: str, conda: str = "") -> str:
    if conda and snapshot.variable("CONDA_PREFIX"):
        return f"conda install -c conda-forge {conda}"
    name = manager(snapshot)
    if name == "pacman":
        return f"sudo pacman -S {debian}"
    if name == "apk":
        return f"sudo apk add {debian}"
    return f"sudo {name} install {debian if name == 'apt-get' else fedora}"


def newer_driver(snapshot: MachineSnapshot) -> str:
    """The command for a newer driver, to run on the host: a container uses the host's driver."""
    ubuntu = os_release(snapshot.text("/etc/os-release")).get("ID") == "ubuntu"
    return (
        "sudo ubuntu-drivers install"
        if ubuntu and not in_container(snapshot)
        else "xdg-open https://www.nvidia.com/drivers"
    )


def in_container(snapshot: MachineSnapshot) -> bool:
    """Whether a container identifies itself as one."""
    return (
        snapshot.text("/.dockerenv") is not None
        or snapshot.text("/run/.containerenv") is not None
        or snapshot.variable("KUBERNETES_SERVICE_HOST") is not None
    )


THEME = "system"
MIN_GXX = (9,)  # the oldest g++ with complete C++17 (according to GCC's status page)
CONTAINER = 'docker run --rm -it -v "$PWD":/work -w /work pytorch/pytorch bash'
MIN_FREE_BYTES, LOW_FREE_BYTES = 2**30, 10 * 2**30
OFF_VALUES = ("", "0", "off", "false")
SLOW_PYTHON = "slows every line of Python down"
SLOW_GRADIENTS = "gradients take a slower path"
# What a variable does if it is on. A pattern in place of None is that of its value.
SLOW_SWITCHES: dict[str, tuple[str | None, str]] = {
    "PYTHONDEVMODE": (None, SLOW_PYTHON),
    "PYTHONTRACEMALLOC": (None, SLOW_PYTHON),
    "PYTHONMALLOC": (r".*debug|malloc", SLOW_PYTHON),
    "CUDA_LAUNCH_BLOCKING": (None, "the processor waits for every kernel"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (None, "each allocation on the GPU is a call into the driver"),
    "NCCL_P2P_DISABLE": (None, SLOW_GRADIENTS),
    "NCCL_SHM_DISABLE": (None, SLOW_GRADIENTS),
    "NCCL_IB_DISABLE": (None, SLOW_GRADIENTS),
    "NCCL_DEBUG": (r"(?i)trace", "NCCL writes a line for every message"),
    "TORCHDYNAMO_DISABLE": (None, "torch.compile does nothing"),
    "TORCH_COMPILE_DISABLE": (None, "torch.compile does nothing"),
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": (None, "every run compiles again"),
    "TORCH_SHOW_DISPATCH_TRACE": (None, "every operation writes a line"),
    "TORCH_DISTRIBUTED_DEBUG": (r"(?i)detail", "every collective operation is checked"),
    "NVIDIA_TF32_OVERRIDE": (r"0", "no library uses Tensor Cores for float32"),
}


@machine_check("FD050", THEME, ["python libc"])
def glibc(snapshot: MachineSnapshot) -> CheckOutcome:
    """The C library is new enough for torch's wheels.

    Wheels of torch since 2.7 are built for glibc 2.28. On CentOS 7 (2.17) or Ubuntu 18.04 (2.27) pip finds
    none of them, or installs a wheel that fails with "GLIBC_2.28 not found".
    """
    kind, text = [*map(str, snapshot.python["libc"]), "", ""][:2]
    if not kind:
        return warning(
            "the C library is not glibc (Alpine's musl?): there are no wheels of torch for it", CONTAINER
        )
    installed = version(text)
    if kind != "glibc" or installed is None:
        return not_checked(f"the C library is {kind} {text}")
    table = versions()
    release = table.release(snapshot.distribution("torch")) or table.releases[0]
    if release.glibc_min is None:
        return note(
            f"glibc {text}; flatout's version table does not list what wheels of torch {release.torch} need"
        )
    requirement = f"glibc {text}; wheels of torch {release.torch} need {dotted(release.glibc_min)}"
    if installed >= release.glibc_min:
        return ok(requirement)
    latest = next((r for r in table.releases if r.glibc_min and r.glibc_min <= installed), None)
    usable = f"; the last torch for it is {latest.torch}, which flatout does not support" if latest else ""
    return problem(requirement + usable, CONTAINER)


@machine_check("FD040", THEME, ["run c++"])
def cpp_compiler(snapshot: MachineSnapshot) -> CheckOutcome:
    """torch.compile has a C++ compiler.

    On the processor torch.compile generates and compiles C++. On the GPU triton compiles a small launcher in
    C. Without a compiler both stop with InvalidCxxCompiler or "Failed to find C compiler".
    """
    run = snapshot.command_results["c++"]
    command = install_command(snapshot, "g++", "gcc-c++", "gxx")
    if not run.installed:
        return warning(f"there is no {run.command[0]}: torch.compile does not work", command)
    first = next((line for line in run.out.splitlines() if line.strip()), "")
    match = re.search(r"(\d+\.\d+(?:\.\d+)?)\s*(?:\d{8}.*)?$", first)
    if run.code != 0 or not match:
        return not_checked(f"`{' '.join(run.command)}` did not report its version")
    if "clang" not in first and (version(match[1]) or ()) < MIN_GXX:
        return warning(
            f"{run.command[0]} {match[1]} is too old for the C++17 that torch.compile generates", command
        )
    return ok(f"{run.command[0]} {match[1]}")


@machine_check("FD041", THEME, ["python version", "python path"])
def python_headers(snapshot: MachineSnapshot) -> CheckOutcome:
    """Python's headers are installed.

    The code that torch.compile and triton compile includes Python.h. Linux distributions package it
    separately from Python.
    """
    header = snapshot.python.get("header")
    if header is True:
        return ok("Python.h is installed")
    if header is False:
        numbers = dotted((version(snapshot.python.get("version")) or (3,))[:2])
        return warning(
            "Python.h is missing: torch.compile and triton cannot build their launchers",
            install_command(snapshot, f"python{numbers}-dev", f"python{numbers}-devel", f"python={numbers}"),
        )
    return not_checked("whether Python.h is installed was not checked")


@machine_check("FD090", THEME, ["disk working folder", "disk temporary folder", "disk cache"])
def disk_space(snapshot: MachineSnapshot) -> CheckOutcome:
    """The working folder, the temporary folder and the cache are writable and have space.

    A checkpoint with the optimizer's state is three times as large as the model. If the disk fills up while
    it is written, it is lost. torch.compile, triton and loader workers write to the temporary folder and the
    cache.
    """
    fixes = {
        "working folder": "du -xh . | sort -h | tail",
        "temporary folder": "export TMPDIR=$HOME/tmp && mkdir -p $TMPDIR",
        "cache": "export XDG_CACHE_HOME=/tmp/cache",
    }
    outcomes = []
    for name, fix in fixes.items():
        disk = snapshot.disks[name]
        where, free = f"the {name} {disk.path}", size(disk.free_bytes)
        if disk.writable is False:
            return problem(f"{where} cannot be written", fix)
        if disk.free_files is not None and disk.free_files < 1000:
            return problem(f"{where} can hold only {disk.free_files} more files (inodes)", fix)
        if disk.free_bytes < MIN_FREE_BYTES:
            return problem(f"{where} has {free} left", fix)
        if disk.free_bytes < LOW_FREE_BYTES:
            outcomes.append(warning(f"{where} has {free} of {size(disk.total_bytes)} left", fix))
    return outcomes[0] if outcomes else ok(f"{size(snapshot.disks['working folder'].free_bytes)} free")


@machine_check("FD100", THEME, ["environment"])
def debugging_switches(snapshot: MachineSnapshot) -> CheckOutcome:
    """No variable left over from debugging slows training down.

    CUDA_LAUNCH_BLOCKING makes the processor wait for every kernel, PYTHONDEVMODE checks every allocation,
    NCCL_P2P_DISABLE sends gradients over the slowest path, TORCHDYNAMO_DISABLE disables torch.compile. They
    often stay set after debugging.
    """
    values = snapshot.environment or {}
    slow = {
        name: effect
        for name, (pattern, effect) in SLOW_SWITCHES.items()
        if name in values
        and (re.fullmatch(pattern, values[name]) if pattern else values[name].lower() not in OFF_VALUES)
    }
    if slow:
        effects = "; ".join(f"{name}={values[name]}: {effect}" for name, effect in slow.items())
        return warning(effects, f"unset {' '.join(slow)}")
    return ok("no debugging variable is set")
