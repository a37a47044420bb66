"""Compilers and child processes for kernel checks: a C++ compiler for the CUDA emulator, nvcc, limits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.job.temporary import temporary_folder

COMPILERS = ("g++", "c++", "clang++")
ROOM = Path(__file__).resolve().parent.parent / "kernels"
FLAGS = ("-std=c++17", "-O0", "-g0", "-shared", "-fPIC", "-ffp-contract=off", "-w")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Ended:
    """How a child process ended.

    ``signal_name`` is "" unless a signal killed it; ``timed_out``: the limit did."""

    code: int
    output: str
    timed_out: bool = False

    @property
    def signal_name(self) -> str:
        return signal.Signals(-self.code).name if self.code < 0 else ""


def run_child(argv: Sequence[str], environment: Mapping[str, str], limit_s: float) -> Ended:
    """Run a child process, and kill its group after ``limit_s`` seconds. Keeps the end of its output."""
    with tempfile.TemporaryFile() as said:
        child = subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        timed_out = False
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
        said.seek(max(said.seek(0, os.SEEK_END) - 8000, 0))
        return Ended(child.returncode, said.read().decode(errors="replace"), timed_out)


def cpp_compiler() -> str | None:
    """Return a C++ compiler of this machine, if any."""
    return next((found for name in COMPILERS if (found := shutil.which(name))), None)


def emulate(source: Path, library: Path, kernels: Sequence[str]) -> str:
    """Compile a .cu file for the CPU (``kernels/emulator.h``). Returns the error, or ""."""
    compiler = cpp_compiler()
    if compiler is None:
        return "there is no C++ compiler; install one with `apt-get install g++`"
    table = "".join(
        f'    if (!std::strcmp(name, "{kernel}")) {{ emulated::launch({kernel}, grid, dim3{{block}}, shared, arguments); return 0; }}\n'
        for kernel in kernels
    )
    text = (
        f'#include "emulator.h"\n#include "{source.resolve()}"\n'
        'extern "C" int flatout_launch(const char* name, unsigned x, unsigned y, unsigned z, unsigned block, size_t shared, void** arguments) {\n'
        f"    dim3 grid{{x, y, z}};\n{table}    return 1;\n}}\n"
    )
    done = subprocess.run(
        [
            compiler,
            *FLAGS,
            "-I",
            str(ROOM),
            "-I",
            str(source.resolve().parent),
            "-x",
            "c++",
            "-",
            "-o",
            str(library),
        ],
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return (
        ""
        if done.returncode == 0
        else f"{source.name} does not compile for the emulator: {_first_error(done.stderr)}"
    )


def nvcc(source: Path, target: str) -> str | None:
    """Compile a .cu file with nvcc for ``target`` ("sm_80"). Returns the error, "", or None without nvcc."""
    compiler = shutil.which("nvcc") or (
        found if (found := "/usr/local/cuda/bin/nvcc") and Path(found).is_file() else None
    )
    if compiler is None:
        return None
    with temporary_folder("nvcc") as folder:
        done = subprocess.run(
            [
                compiler,
                "--cubin",
                f"-arch={target}",
                "-std=c++17",
                "-I",
                str(ROOM),
                "-o",
                f"{folder}/kernel.cubin",
                str(source),
            ],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    return "" if done.returncode == 0 else _first_error(done.stderr)


def _first_error(words: str) -> str:
    return next((line.strip() for line in words.splitlines() if "error" in line), words.strip()[:300])
