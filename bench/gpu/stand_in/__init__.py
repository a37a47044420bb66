"""A card that is not there: torch's own CUDA code runs, on host memory and CPU kernels, in the environment that ``environment`` gives.

``runtime.cpp`` is a CUDA runtime without a card and is preloaded into each process; ``operators.cpp`` computes on the host what kernels
would compute on a card. Both are compiled here, once for each torch and each text of theirs, with the headers that torch and triton bring.
They lean on torch's private parts, so only the versions in ``VERSIONS`` are supported. What is not there: compiled kernels (Triton),
cuDNN, cuBLAS and NCCL themselves, times, and the order in which a card adds numbers.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
VERSIONS = ("2.14.1+cu130",)  # tried with these
CARDS = 2
MIB = 2048  # of memory on each card
PRELOADED = ("libcuda.so.1", "libnvidia-ml.so.1")
LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda")


def missing() -> str | None:
    """Why there is no stand-in here; None where there can be one."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    local = _torch() / "version.py"
    text = local.read_text(encoding="utf-8") if local.is_file() else version
    if not any(repr(known)[1:-1] in text for known in VERSIONS):
        return f"the stand-in for a card was tried with torch {' and '.join(VERSIONS)}, not with {version}"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the stand-in for a card with"
    if not (_headers() / "cuda_runtime_api.h").is_file():
        return "triton, which brings the headers of CUDA, is not installed"
    return None


def environment(before: Mapping[str, str] | None = None, cards: int = CARDS, mib: int = MIB, waits: Path | None = None,
                kernel_us: int = 0) -> dict[str, str]:
    """``before`` (the present environment by default) and what puts ``cards`` cards with ``mib`` MiB each in the place of the machine's.

    ``waits``: a file to which each process appends, at its end, how often which line waited for the card (count, call, line; separated by tabs).
    ``kernel_us``: how long each kernel and copy keeps the card busy, beside the host, which computes them at their launch.
    Raises RuntimeError where the stand-in cannot be compiled.
    """
    folder = built()
    values = dict(os.environ if before is None else before)
    preloads = [*(str(folder / name) for name in PRELOADED), *filter(None, values.get("LD_PRELOAD", "").split(":"))]
    values |= {"LD_PRELOAD": ":".join(preloads), "CUDA_STAND_IN_OPERATORS": str(folder / "operators.so"),
               "CUDA_STAND_IN_DEVICES": str(cards), "CUDA_STAND_IN_MIB": str(mib), "CUDA_STAND_IN_KERNEL_US": str(kernel_us)}
    return values | ({"CUDA_STAND_IN_WAITS": str(waits)} if waits else {})


def built() -> Path:
    """The folder with both libraries, which are compiled where they are not there yet: about 25 seconds.

    Raises RuntimeError with the compiler's words, or with the reason why they cannot be compiled here.
    """
    if why := missing():
        raise RuntimeError(why)
    sources = [HERE / "runtime.cpp", HERE / "nvml.cpp", HERE / "operators.cpp"]
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources) + str(_torch()).encode()).hexdigest()[:16]
    folder = HERE / "build" / digest
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            for source, name in zip(sources, PRELOADED, strict=False):
                _compile([str(source), f"-Wl,-soname,{name}", "-ldl"], folder / name)
            library = _torch() / "lib"
            include = [f"-I{_torch() / 'include'}", f"-I{_torch() / 'include/torch/csrc/api/include'}", f"-I{sysconfig.get_paths()['include']}"]
            _compile([str(sources[-1]), *include, f"-L{library}", *(f"-l{name}" for name in LIBRARIES)], folder / "operators.so")
            (folder / "ready").touch()
    return folder


def _compile(arguments: list[str], output: Path) -> None:
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", f"-I{_headers()}", *arguments, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{output.name} of the stand-in could not be compiled:\n{done.stderr[-4000:]}")


def _torch() -> Path:
    return _package("torch")


def _headers() -> Path:
    return _package("triton") / "backends" / "nvidia" / "include"


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    return Path(next(iter(found.submodule_search_locations))) if found and found.submodule_search_locations else HERE / "none"
