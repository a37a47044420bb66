"""Compilers: the C++ compiler and the headers that torch.compile calls for, and nvcc for those who build kernels."""

from __future__ import annotations

import re

from flatout.diagnose.doctor.check import Answer, note, ok, question, unseen, version, warning
from flatout.diagnose.doctor.packages import install
from flatout.diagnose.doctor.torch_build import build_of
from flatout.plan.sight import Sight

THEME = "compilers"
CXX17 = (9,)  # the oldest g++ whose C++17 is complete (GCC's own status page)


@question("FD040", THEME, ["run c++"])
def cpp_compiler(sight: Sight) -> Answer:
    """There is a C++ compiler that torch.compile can use.

    Why it matters:
        On the processor torch.compile writes C++ and compiles it; on the GPU triton compiles a small launcher in C. Without a compiler both
        stop with InvalidCxxCompiler or "Failed to find C compiler".
    How to mend it:
        `apt-get install g++`, or in conda `conda install -c conda-forge gxx`.
    """
    run = sight.runs["c++"]
    if not run.there:
        return warning(f"there is no {run.command[0]}: torch.compile cannot work", install(sight, "g++", "gcc-c++", "gxx"))
    first = next((line for line in run.out.splitlines() if line.strip()), "")
    found = re.search(r"(\d+\.\d+(?:\.\d+)?)\s*(?:\d{8}.*)?$", first)
    if run.code != 0 or not found:
        return unseen(f"`{' '.join(run.command)}` did not tell its version")
    if "clang" not in first and (version(found[1]) or ()) < CXX17:
        return warning(f"{run.command[0]} {found[1]} is too old for what torch.compile writes (C++17)", install(sight, "g++", "gcc-c++", "gxx"))
    return ok(f"{run.command[0]} {found[1]}")


@question("FD041", THEME, ["python version", "python path"])
def python_headers(sight: Sight) -> Answer:
    """Python's own headers are there.

    Why it matters:
        What torch.compile and triton compile includes Python.h. Systems' packages of Python leave it out.
    How to mend it:
        `apt-get install python3-dev` (Fedora: `dnf install python3-devel`).
    """
    there = sight.python.get("header")
    if there is True:
        return ok("Python.h is there")
    if there is False:
        numbers = ".".join(map(str, (version(sight.python.get("version")) or (3,))[:2]))
        return warning("Python.h is not there: torch.compile and triton cannot build their launchers",
                       install(sight, f"python{numbers}-dev", f"python{numbers}-devel", f"python={numbers}"))
    return unseen("whether Python.h is there was not looked at")


@question("FD042", THEME, ["run nvcc"])
def nvcc(sight: Sight) -> Answer:
    """nvcc, where there is one, is of torch's CUDA.

    Why it matters:
        torch itself needs no nvcc. Packages that compile CUDA when they are installed do, and torch refuses an nvcc of another major version.
    How to mend it:
        `conda install -c nvidia cuda-nvcc=12.6`, or the CUDA toolkit of the same version as `torch.version.cuda`.
    """
    run, build = sight.runs["nvcc"], build_of(sight)
    if not run.there:
        return note("there is no nvcc; only packages that compile CUDA themselves need it")
    found = re.search(r"release (\d+\.\d+)", run.out)
    if run.code != 0 or not found:
        return unseen("nvcc did not tell its version")
    here, cuda = version(found[1]) or (), version((build or {}).get("cuda"))
    if build is None:
        return note(f"nvcc {found[1]}; which CUDA torch was built for could not be seen")
    if cuda is None:
        return note(f"nvcc {found[1]}; this torch was built for the CPU")
    if here[0] != cuda[0]:
        return warning(f"nvcc {found[1]}, and torch was built for CUDA {build['cuda']}: extensions cannot be built",
                       f"conda install -c nvidia cuda-nvcc={build['cuda']}")
    if here != cuda[:2]:
        return note(f"nvcc {found[1]}, torch was built for CUDA {build['cuda']}: of one major version, which works")
    return ok(f"nvcc {found[1]}, as torch")


QUESTIONS = (cpp_compiler, python_headers, nvcc)
