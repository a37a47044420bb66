"""Checks of torch's build and of the CUDA libraries that it loads and requires."""

import re
from collections.abc import Mapping
from typing import Any

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    machine_check,
    not_checked,
    note,
    ok,
    problem,
    version,
    warning,
)
from flatout.diagnose.doctor.nvidia_smi import driver_version, has_gpu
from flatout.diagnose.doctor.versions import versions
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "torch"


def build_of(snapshot: MachineSnapshot) -> Mapping[str, Any] | None:
    """The stage "build", or the data in the version number if torch cannot be imported, or None."""
    build = snapshot.torch.get("build")
    if isinstance(build, dict) and isinstance(build.get("version"), str):
        return build
    installed = snapshot.distribution("torch") or ""
    tag = re.search(r"\+(cpu|cu(\d+)(\d))", installed)
    return {"version": installed, "cuda": f"{tag[2]}.{tag[3]}" if tag[2] else None} if tag else None


@machine_check("FD012", THEME)
def cuda_build(snapshot: MachineSnapshot) -> CheckOutcome:
    """torch is built for this machine's device.

    Why it matters:
        A CPU build on a machine with a GPU trains on the processor, tens of times slower, or stops with
        "Torch not compiled with CUDA enabled".
    How to fix it:
        Install a CUDA build that the driver supports: `pip install --force-reinstall torch --index-url
        https://download.pytorch.org/whl/cu126`.
    """
    build, gpu = build_of(snapshot), has_gpu(snapshot)
    if build is None:
        return not_checked("the CUDA version of the torch build could not be determined")
    cuda = build.get("cuda")
    if build.get("hip"):
        return note(
            f"torch {build['version']} was built for ROCm {build['hip']}; flatout supports CUDA and the CPU"
        )
    if cuda is None and gpu:
        release, driver = versions().release(build["version"]), version(driver_version(snapshot))
        supported = versions().cuda_for_driver(release, driver) if release and driver else None
        return problem(
            f"torch {build['version']} was built for the CPU only, and this machine has an NVIDIA GPU",
            versions().install_command(build["version"], supported or "12.6"),
        )
    if cuda is not None and gpu is False:
        return note(
            f"torch {build['version']} was built for CUDA {cuda}, and no NVIDIA GPU was found: training runs on the processor; "
            "the CPU build is several GB smaller",
            versions().install_command(build["version"], None),
        )
    if gpu is None:
        return not_checked(
            f"torch {build['version']} was built for {f'CUDA {cuda}' if cuda else 'the CPU'}; whether there is a GPU could not be determined"
        )
    return ok(f"torch {build['version']}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}")


@machine_check("FD018", THEME, ["torch libraries", "python path"])
def loaded_libraries(snapshot: MachineSnapshot) -> CheckOutcome:
    """The loaded CUDA libraries are torch's own, with a single OpenMP.

    Why it matters:
        LD_LIBRARY_PATH or LD_PRELOAD can replace the library that torch was tested with by another CUDA's:
        wrong versions, missing symbols, slow kernels. Two OpenMP runtimes in one process create twice as many
        threads as there are cores.
    How to fix it:
        `unset LD_LIBRARY_PATH`; keep a single OpenMP.
    """
    loaded = snapshot.torch["libraries"].get("loaded")
    if not isinstance(loaded, list) or not any("libtorch_cpu" in str(path) for path in loaded):
        return not_checked("the loaded libraries were not recorded")
    paths = [str(path) for path in loaded]
    own_folders = tuple(str(folder).rstrip("/") + "/" for folder in snapshot.python["path"])
    foreign = [
        p
        for p in paths
        if not p.startswith(own_folders) and re.search(r"lib(cudart|cublas|cudnn|nccl|nvrtc)", p)
    ]
    if foreign:
        return warning(
            f"{foreign[0]} was loaded, but it is not torch's own", "unset LD_LIBRARY_PATH", foreign
        )
    runtimes = sorted({match[0] for p in paths if (match := re.search(r"lib(gomp|iomp5|omp)\b", p))})
    copies = [p for p in paths if re.search(r"lib(gomp|iomp5|omp)\b", p)]
    if len(runtimes) > 1:
        return note(f"two OpenMP runtimes are loaded: {', '.join(runtimes)}", evidence=copies)
    cuda = [p for p in paths if "libcudart" in p]
    return ok(f"libcudart from {cuda[0]}" if cuda else "no CUDA library is loaded, and none is needed")


CHECKS = (cuda_build, loaded_libraries)
