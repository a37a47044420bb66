"""A stand-in for a GPU: torch's own CUDA code runs on host memory and CPU kernels.

``environment`` gives the environment for it. ``runtime.cpp`` is a CUDA runtime without a GPU, preloaded into
each process. ``operators.cpp`` computes on the host what kernels would compute on a GPU. Both are compiled
here, once for each torch and each version of their text, with the headers of torch and triton. They depend on
torch's internals, so only the versions in ``VERSIONS`` are supported. Not included: compiled kernels
(Triton), cuDNN, cuBLAS and NCCL themselves, times, and the order in which a GPU adds numbers.
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
VERSIONS = ("2.14.1+cu130",)  # tested versions
CARDS = 2
MIB = 2048  # memory of each card
PRELOADED = ("libcuda.so.1", "libnvidia-ml.so.1")
LIBRARIES = ("c10", "c10_cuda", "torch_cpu", "torch_cuda")


def missing() -> str | None:
    """Returns why the stand-in is unavailable here; None if it is available."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed"
    local = _torch() / "version.py"
    text = local.read_text(encoding="utf-8") if local.is_file() else version
    if not any(repr(known)[1:-1] in text for known in VERSIONS):
        return f"the stand-in for a GPU supports torch {' and '.join(VERSIONS)}, not {version}"
    if shutil.which("g++") is None:
        return "g++ is not installed; the stand-in for a GPU needs it to compile"
    if not (_headers() / "cuda_runtime_api.h").is_file():
        return "triton is not installed; the stand-in needs its CUDA headers"
    return None


def environment(
    before: Mapping[str, str] | None = None,
    cards: int = CARDS,
    mib: int = MIB,
    waits: Path | None = None,
    kernel_us: int = 0,
    empty_kernels: bool = False,
) -> dict[str, str]:
    """Returns ``before`` (default: the current environment) with stand-in cards instead of real GPUs.

    ``cards`` cards have ``mib`` MiB each. ``waits``: a file to which each process appends at its end how
    often each line waited for the card (count, call, line; separated by tabs). ``kernel_us``: how long each
    kernel and copy keeps the card busy, in addition to the host, which computes them at their launch.
    ``empty_kernels``: torch's own CUDA code launches kernels that do nothing. Results are then meaningless, and
    the host's time is that of torch's code alone. Raises RuntimeError where the stand-in cannot be compiled.
    """
    folder = built()
    values = dict(os.environ if before is None else before)
    preloads = [
        *(str(folder / name) for name in PRELOADED),
        *filter(None, values.get("LD_PRELOAD", "").split(":")),
    ]
    values |= {
        "LD_PRELOAD": ":".join(preloads),
        "CUDA_STAND_IN_OPERATORS": str(folder / "operators.so"),
        "CUDA_STAND_IN_DEVICES": str(cards),
        "CUDA_STAND_IN_MIB": str(mib),
        "CUDA_STAND_IN_KERNEL_US": str(kernel_us),
    }
    if empty_kernels:
        del values["CUDA_STAND_IN_OPERATORS"]
        values["CUDA_STAND_IN_EMPTY_KERNELS"] = "1"
    return values | ({"CUDA_STAND_IN_WAITS": str(waits)} if waits else {})


def built() -> Path:
    """Returns the folder with both libraries, and compiles missing ones: about 25 seconds.

    Raises RuntimeError with the compiler's output, or with the reason why they cannot be compiled here.
    """
    if why := missing():
        raise RuntimeError(why)
    sources = [HERE / "runtime.cpp", HERE / "nvml.cpp", HERE / "operators.cpp"]
    digest = hashlib.sha256(
        b"".join(source.read_bytes() for source in sources) + str(_torch()).encode()
    ).hexdigest()[:16]
    folder = HERE / "build" / digest
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            for source, name in zip(sources, PRELOADED, strict=False):
                _compile([str(source), f"-Wl,-soname,{name}", "-ldl"], folder / name)
            library = _torch() / "lib"
            include = [
                f"-I{_torch() / 'include'}",
                f"-I{_torch() / 'include/torch/csrc/api/include'}",
                f"-I{sysconfig.get_paths()['include']}",
            ]
            _compile(
                [str(sources[-1]), *include, f"-L{library}", *(f"-l{name}" for name in LIBRARIES)],
                folder / "operators.so",
            )
            (folder / "ready").touch()
    return folder


def _compile(arguments: list[str], output: Path) -> None:
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        "-shared",
        "-fPIC",
        "-w",
        f"-I{_headers()}",
        *arguments,
        "-o",
        str(output),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{output.name} of the stand-in could not be compiled:\n{done.stderr[-4000:]}")


def _torch() -> Path:
    return _package("torch")


def _headers() -> Path:
    return _package("triton") / "backends" / "nvidia" / "include"


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    return (
        Path(next(iter(found.submodule_search_locations)))
        if found and found.submodule_search_locations
        else HERE / "none"
    )
