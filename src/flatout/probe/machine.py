"""Detect the machine and its software without importing torch."""

from __future__ import annotations

import glob
import importlib.metadata
import os
import platform
from pathlib import Path

from flatout.probe.cgroup import group
from flatout.probe.gpus import gpus_asked_for
from flatout.schema.facts import ASKED_DEVICE, Facts

WATCHED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "LD_PRELOAD",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "GLIBC_TUNABLES",
    "CUDA_VISIBLE_DEVICES",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_CONF",
    "MIMALLOC_PURGE_DELAY",
    ASKED_DEVICE,
)
DISTRIBUTIONS = ("torch", "torchvision", "numpy", "lightning", "triton", "cmeel-mimalloc")
LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
    "/lib64",
    "/lib",
)
ALLOCATORS = {
    "tcmalloc": ("libtcmalloc_minimal.so.*", "libtcmalloc.so.*"),
    "jemalloc": ("libjemalloc.so.*",),
    "mimalloc": ("libmimalloc.so.*",),
}


def look() -> Facts:
    """Return all facts that are cheap to get. Missing ones keep their defaults."""
    how = {
        "cpu": "/proc/cpuinfo",
        "cores": "sched_getaffinity and the cgroup's quota",
        "memory_bytes": "sysconf",
        "gpus": "the CUDA driver",
        "versions": "importlib.metadata",
        "allocators": "library folders and installed wheels",
    }
    model, flags = _cpu()
    versions = {name: version for name in DISTRIBUTIONS if (version := _version(name))}
    return Facts(
        cpu=model,
        cores=_cores(),
        memory_bytes=_memory(),
        cpu_flags=flags,
        gpus=gpus_asked_for(),
        system=platform.system(),
        python=platform.python_version(),
        versions=versions,
        environment={n: os.environ[n] for n in WATCHED if n in os.environ},
        allocators=_allocators(),
        how=how,
    )


def _cpu() -> tuple[str, tuple[str, ...]]:
    model, flags = platform.machine(), ()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                interesting = (
                    "avx2",
                    "avx512f",
                    "avx512_bf16",
                    "amx_bf16",
                    "avx512_fp16",
                    "asimd",
                    "bf16",
                    "sve",
                )
                return model, tuple(flag for flag in value.split() if flag in interesting)
    except OSError:
        pass
    return model, flags


def _cores() -> int:
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = group(_text).cores
    return min(available, max(1, round(quota))) if quota else available


def _memory() -> int:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    limit = group(_text).memory_bytes
    return min(total, limit) if limit else total


def _text(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def oom_kills() -> int | None:
    """Return how many processes of this control group the kernel killed for lack of memory.

    None if unknown.
    """
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text(encoding="utf-8").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
    except (OSError, ValueError, IndexError):
        return None


def _allocators() -> dict[str, str]:
    if platform.system() != "Linux":
        return {}
    found = {}
    for name, patterns in ALLOCATORS.items():
        paths = [
            p
            for folder in LIBRARIES
            for pattern in patterns
            for p in sorted(glob.glob(f"{folder}/{pattern}"))
        ]
        if paths:
            found[name] = paths[0]
    if "mimalloc" not in found:
        wheel = _file_of("cmeel-mimalloc", "libmimalloc.so")
        if wheel:
            found["mimalloc"] = wheel
    if platform.libc_ver()[0] == "glibc":
        found["glibc"] = "libc"
    return found


def _file_of(distribution: str, start: str) -> str | None:
    """Return the real path of a shared library from a wheel."""
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(f.locate())) for f in files if f.name.startswith(start)]
    return next((str(p.resolve()) for p in paths if p.is_file()), None)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
