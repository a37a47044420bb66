"""Checks of compilers: the C++ compiler and headers for torch.compile, and nvcc for building kernels."""

from __future__ import annotations

import re

from flatout.diagnose.doctor.check import CheckOutcome, machine_check, not_seen, note, ok, version, warning
from flatout.diagnose.doctor.packages import install
from flatout.diagnose.doctor.torch_build import build_of
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "compilers"
CXX17 = (9,)  # the oldest g++ with complete C++17 (according to GCC's status page)


@machine_check("FD040", THEME, ["run c++"])
def cpp_compiler(snapshot: MachineSnapshot) -> CheckOutcome:
    """torch.compile has a C++ compiler.

    Why it matters:
        On the processor torch.compile generates and compiles C++. On the GPU triton compiles a small launcher
        in C. Without a compiler both stop with InvalidCxxCompiler or "Failed to find C compiler".
    How to fix it:
        `apt-get install g++`, or in conda `conda install -c conda-forge gxx`.
    """
    run = snapshot.runs["c++"]
    if not run.there:
        return warning(
            f"there is no {run.command[0]}: torch.compile does not work",
            install(snapshot, "g++", "gcc-c++", "gxx"),
        )
    first = next((line for line in run.out.splitlines() if line.strip()), "")
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)\s*(?:\d{8}.*)?$", first)
    if run.code != 0 or not found:
        return not_seen(f"`{' '.join(run.command)}` did not report its version")
    if "clang" not in first and (version(found[1]) or ()) < CXX17:
        return warning(
            f"{run.command[0]} {found[1]} is too old for the C++17 that torch.compile generates",
            install(snapshot, "g++", "gcc-c++", "gxx"),
        )
    return ok(f"{run.command[0]} {found[1]}")


@machine_check("FD041", THEME, ["python version", "python path"])
def python_headers(snapshot: MachineSnapshot) -> CheckOutcome:
    """Python's headers are installed.

    Why it matters:
        The code that torch.compile and triton compile includes Python.h. Linux distributions package it
        separately from Python.
    How to fix it:
        `apt-get install python3-dev` (Fedora: `dnf install python3-devel`).
    """
    there = snapshot.python.get("header")
    if there is True:
        return ok("Python.h is installed")
    if there is False:
        numbers = ".".join(map(str, (version(snapshot.python.get("version")) or (3,))[:2]))
        return warning(
            "Python.h is missing: torch.compile and triton cannot build their launchers",
            install(snapshot, f"python{numbers}-dev", f"python{numbers}-devel", f"python={numbers}"),
        )
    return not_seen("whether Python.h is installed was not checked")


@machine_check("FD042", THEME, ["run nvcc"])
def nvcc(snapshot: MachineSnapshot) -> CheckOutcome:
    """nvcc, if installed, matches torch's CUDA version.

    Why it matters:
        torch itself needs no nvcc. Packages that compile CUDA at installation do, and torch rejects an nvcc
        of another major version.
    How to fix it:
        `conda install -c nvidia cuda-nvcc=12.6`, or the CUDA toolkit of the version in `torch.version.cuda`.
    """
    run, build = snapshot.runs["nvcc"], build_of(snapshot)
    if not run.there:
        return note("there is no nvcc; only packages that compile CUDA themselves need it")
    found = re.search(r"release (\d+\.\d+)", run.out)
    if run.code != 0 or not found:
        return not_seen("nvcc did not report its version")
    here, cuda = version(found[1]) or (), version((build or {}).get("cuda"))
    if build is None:
        return note(f"nvcc {found[1]}; the CUDA version of the torch build could not be determined")
    if cuda is None:
        return note(f"nvcc {found[1]}; this torch was built for the CPU")
    if here[0] != cuda[0]:
        return warning(
            f"nvcc {found[1]}, but torch was built for CUDA {build['cuda']}: extensions cannot be built",
            f"conda install -c nvidia cuda-nvcc={build['cuda']}",
        )
    if here != cuda[:2]:
        return note(
            f"nvcc {found[1]}, torch was built for CUDA {build['cuda']}: the same major version, which works"
        )
    return ok(f"nvcc {found[1]}, the same version as torch")


QUESTIONS = (cpp_compiler, python_headers, nvcc)
