"""Detect the machine and its software without importing torch."""

import glob
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from flatout.job.interpreter import is_flatout_python, python_of, versions_of
from flatout.probe.cgroup import group
from flatout.probe.gpus import visible_gpus
from flatout.schema.facts import DEVICE_VARIABLE, Facts

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
    DEVICE_VARIABLE,
)
CPU_FLAGS = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "avx512_fp16", "asimd", "bf16", "sve"}
DISTRIBUTIONS = (
    "torch",
    "torchvision",
    "numpy",
    "lightning",
    "triton",
    "cmeel-mimalloc",
    "flash-attn-3",
    "flash-attn-4",
)
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


def look(argv: Sequence[str] = ()) -> Facts:
    """Return all facts that are cheap to get, of the Python that ``argv`` starts. Missing ones keep their defaults."""
    return with_software(hardware(), argv)


def with_software(facts: Facts, argv: Sequence[str]) -> Facts:
    """Add the versions and allocators. Only a plan needs them, and reading them takes longest."""
    python, at, version = python_of(argv), _distributions(), facts.python
    versions = {name: at[name].stem.partition("-")[2] for name in DISTRIBUTIONS if name in at}
    if not is_flatout_python(python):
        version, versions = versions_of(python, *DISTRIBUTIONS)
    return replace(facts, python=version, versions=versions, allocators=_allocators())


def hardware() -> Facts:
    model, flags = _cpu()
    return Facts(
        cpu=model,
        cores=_cores(),
        memory_bytes=_memory(),
        cpu_flags=flags,
        gpus=visible_gpus(),
        system=platform.system(),
        python=platform.python_version(),
        environment={n: os.environ[n] for n in WATCHED if n in os.environ},
    )


def _cpu() -> tuple[str, tuple[str, ...]]:
    model, flags = platform.machine(), ()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                return model, tuple(flag for flag in value.split() if flag in CPU_FLAGS)
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


def _allocators() -> dict[str, str]:
    if platform.system() != "Linux":
        return {}
    found = {}
    for name, patterns in ALLOCATORS.items():
        places = (f"{folder}/{pattern}" for folder in LIBRARIES for pattern in patterns)
        if path := next((path for place in places for path in sorted(glob.glob(place))), None):
            found[name] = path
    if "mimalloc" not in found and (wheel := _file_of("cmeel-mimalloc", "libmimalloc.so")):
        found["mimalloc"] = wheel
    if platform.libc_ver()[0] == "glibc":
        found["glibc"] = "libc"
    return found


def _file_of(distribution: str, start: str) -> str | None:
    """Return the real path of a shared library from a wheel."""
    folder = _distributions().get(distribution)
    lines = (_text(f"{folder}/RECORD") or "").splitlines() if folder is not None else ()
    names = (line.partition(",")[0] for line in lines)
    paths = (folder.parent / name for name in names if folder and name.rpartition("/")[2].startswith(start))
    return next((str(path.resolve()) for path in paths if path.is_file()), None)


@cache
def _distributions() -> dict[str, Path]:
    """Return the metadata folder of each distribution on the path, by name. importlib.metadata takes 30 ms."""
    found: dict[str, Path] = {}
    for path in map(Path, sys.path):
        for name in os.listdir(path) if path.is_dir() else ():
            if name.endswith(".dist-info"):
                found.setdefault(name.partition("-")[0].replace("_", "-").lower(), path / name)
    return found
