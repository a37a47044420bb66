"""The C++ compiler that builds kernels for the CUDA emulator."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("g++", "c++", "clang++")
KERNELS_FOLDER = Path(__file__).resolve().parent.parent / "kernels"
FLAGS = ("-std=c++17", "-O0", "-g0", "-shared", "-fPIC", "-ffp-contract=off", "-w")
TIMEOUT_S = 120.0


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
    if not result.returncode:
        return ""
    errors = [line.strip() for line in result.stderr.splitlines() if "error" in line]
    return f"{source.name} does not compile for the emulator: {[*errors, result.stderr.strip()[:300]][0]}"
