"""Imports torch and records what it reports: ``python -m flatout.diagnose.doctor.torch_child FILE [describe]``.

Runs in a child process of `flatout doctor`, because a broken torch may raise, crash or hang. Writes one JSON
object per line at once, so that the parent sees how far the child got. With "describe" it first describes
its interpreter, which is not flatout's.
"""

import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from flatout.measure.clock import seconds

DESCRIBE = "describe"
LIBRARY = re.compile(
    r"(/\S*/lib(?:cudart|cublas|cublasLt|cudnn|nccl|nvrtc|cuda|gomp|iomp5|omp|torch_cuda|torch_cpu)[-.\w]*\.so[.\d]*)$",
    re.MULTILINE,
)


def record_torch(write: Callable[..., None]) -> None:
    """Writes one line per stage; an exception replaces the result of its stage."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    folders = list(getattr(spec, "submodule_search_locations", None) or ())
    compiled = [entry.name for folder in folders for entry in Path(folder).glob("_C.*so")]
    write(stage="found", origin=getattr(spec, "origin", None), places=folders, compiled=compiled)
    if spec is None:
        return
    start = seconds()
    try:
        import torch
    except BaseException as error:
        write(
            stage="import failed",
            kind=type(error).__name__,
            message=str(error),
            traceback=traceback.format_exc()[-6000:],
        )
        return
    write(stage="imported", import_s=seconds() - start, file=getattr(torch, "__file__", None))
    for stage, describe in {"build": _build, "host": _host, "libraries": _libraries, "cuda": _cuda}.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                answer = describe(torch)
            except Exception as error:  # a partial installation of torch may lack anything
                answer = {"raised": f"{type(error).__name__}: {error}"}
        write(stage=stage, **answer, warnings=[str(warning.message) for warning in caught])


def _build(torch: ModuleType) -> dict[str, Any]:
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _host(torch: ModuleType) -> dict[str, Any]:
    return {"threads": torch.get_num_threads()}


def _libraries(torch: ModuleType) -> dict[str, Any]:
    """The loaded files, according to the kernel instead of the search path."""
    return {
        "loaded": sorted(
            set(LIBRARY.findall(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")))
        )
    }


def _cuda(torch: ModuleType) -> dict[str, Any]:
    if torch.version.cuda is None and torch.version.hip is None:
        return {"available": False}
    available = torch.cuda.is_available()
    answer: dict[str, Any] = {"available": available}
    if available:
        devices = (torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count()))
        answer["devices"] = [
            {
                "name": device.name,
                "capability": [device.major, device.minor],
                "memory_bytes": device.total_memory,
            }
            for device in devices
        ]
        value = torch.ones(64, device="cuda")
        answer["computes"] = float((value + value).sum().item()) == 128.0
    return answer


def main(path: str, *describe: str) -> None:
    with open(path, "a", encoding="utf-8") as file:

        def write(**record: object) -> None:
            file.write(json.dumps(record) + "\n")
            file.flush()

        if describe:
            from flatout.probe.snapshot import packages, python

            write(stage="interpreter", python=python(), packages=packages(sys.path))
        record_torch(write)


if __name__ == "__main__":
    main(*sys.argv[1:])
