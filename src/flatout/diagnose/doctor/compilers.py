"""Checks of compilers: the C++ compiler and headers for torch.compile, and nvcc for building kernels."""

from __future__ import annotations

import re

from flatout.diagnose.doctor.check import Answer, note, ok, question, unseen, version, warning
from flatout.diagnose.doctor.packages import install
from flatout.diagnose.doctor.torch_build import build_of
from flatout.plan.sight import Sight

THEME = "compilers"
CXX17 = (9,)  # the oldest g++ with complete C++17 (according to GCC's status page)


@question("FD040", THEME, ["run c++"])
def cpp_compiler(sight: Sight) -> Answer:
    """torch.compile has a C++ compiler.

    Why it matters:
        On the processor torch.compile generates and compiles C++. On the GPU triton compiles a small launcher
        in C. Without a compiler both stop with InvalidCxxCompiler or "Failed to find C compiler".
    How to mend it:
        `apt-get install g++`, or in conda `conda install -c conda-forge gxx`.
    """
    run = sight.runs["c++"]
    if not run.there:
        return warning(f"there is no {run.command[0]}: torch.compile does not work", install(sight, "g++", "gcc-c++", "gxx"))
    first = next((line for line in run.out.splitlines() if line.strip()), "")
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)\s*(?:\d{8}.*)?$", first)
    if run.code != 0 or not found:
        return unseen(f"`{' '.join(run.command)}` did not report its version")
    if "clang" not in first and (version(found[1]) or ()) < CXX17:
        return warning(f"{run.command[0]} {found[1]} is too old for the C++17 that torch.compile generates", install(sight, "g++", "gcc-c++", "gxx"))
    return ok(f"{run.command[0]} {found[1]}")


@question("FD041", THEME, ["python version", "python path"])
def python_headers(sight: Sight) -> Answer:
    """Python's headers are installed.

    Why it matters:
        The code that torch.compile and triton compile includes Python.h. Linux distributions package it
        separately from Python.
    How to mend it:
        `apt-get install python3-dev` (Fedora: `dnf install python3-devel`).
    """
    there = sight.python.get("header")
    if there is True:
        return ok("Python.h is installed")
    if there is False:
        numbers = ".".join(map(str, (version(sight.python.get("version")) or (3,))[:2]))
        return warning("Python.h is missing: torch.compile and triton cannot build their launchers",
                       install(sight, f"python{numbers}-dev", f"python{numbers}-devel", f"python={numbers}"))
    return unseen("whether Python.h is installed was not checked")


@question("FD042", THEME, ["run nvcc"])
def nvcc(sight: Sight) -> Answer:
    """nvcc, if installed, matches torch's CUDA version.

    Why it matters:
        torch itself needs no nvcc. Packages that compile CUDA at installation do, and torch rejects an nvcc
        of another major version.
    How to mend it:
        `conda install -c nvidia cuda-nvcc=12.6`, or the CUDA toolkit of the version in `torch.version.cuda`.
    """
    run, build = sight.runs["nvcc"], build_of(sight)
    if not run.there:
        return note("there is no nvcc; only packages that compile CUDA themselves need it")
    found = re.search(r"release (\d+\.\d+)", run.out)
    if run.code != 0 or not found:
        return unseen("nvcc did not report its version")
    here, cuda = version(found[1]) or (), version((build or {}).get("cuda"))
    if build is None:
        return note(f"nvcc {found[1]}; the CUDA version of the torch build could not be determined")
    if cuda is None:
        return note(f"nvcc {found[1]}; this torch was built for the CPU")
    if here[0] != cuda[0]:
        return warning(f"nvcc {found[1]}, but torch was built for CUDA {build['cuda']}: extensions cannot be built",
                       f"conda install -c nvidia cuda-nvcc={build['cuda']}")
    if here != cuda[:2]:
        return note(f"nvcc {found[1]}, torch was built for CUDA {build['cuda']}: the same major version, which works")
    return ok(f"nvcc {found[1]}, the same version as torch")


QUESTIONS = (cpp_compiler, python_headers, nvcc)
