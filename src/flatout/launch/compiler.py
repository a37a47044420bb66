"""Compilers and child processes for kernel checks: a C++ compiler for the CUDA emulator, limits."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

COMPILERS = ("g++", "c++", "clang++")
KERNELS_FOLDER = Path(__file__).resolve().parent.parent / "kernels"
FLAGS = ("-std=c++17", "-O0", "-g0", "-shared", "-fPIC", "-ffp-contract=off", "-w")
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class ChildResult:
    """How a child process ended.

    ``signal_name`` is "" unless a signal killed it; ``timed_out``: the limit did."""

    code: int
    output: str
    timed_out: bool = False

    @property
    def signal_name(self) -> str:
        return signal.Signals(-self.code).name if self.code < 0 else ""


def run_child(argv: Sequence[str], environment: Mapping[str, str], limit_s: float) -> ChildResult:
    """Run a child process, and kill its group after ``limit_s`` seconds. Keeps the end of its output."""
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            list(argv),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
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
        output.seek(max(output.seek(0, os.SEEK_END) - 8000, 0))
        return ChildResult(child.returncode, output.read().decode(errors="replace"), timed_out)


def cpp_compiler() -> str | None:
    """A C++ compiler of this machine, if any."""
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


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
    folders = (str(KERNELS_FOLDER), str(source.resolve().parent))
    result = subprocess.run(
        [compiler, *FLAGS, *(f"-I{folder}" for folder in folders), "-x", "c++", "-", "-o", str(library)],
        input=text,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return (
        ""
        if result.returncode == 0
        else f"{source.name} does not compile for the emulator: {_first_error(result.stderr)}"
    )


def _first_error(output: str) -> str:
    return next((line.strip() for line in output.splitlines() if "error" in line), output.strip()[:300])
