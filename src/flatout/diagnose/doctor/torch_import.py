"""Checks whether torch can be imported, of its build, and of the CUDA libraries that it loads and requires.

Errors of the import are explained as `flatout explain` explains them.
"""

import re
import signal
from collections.abc import Mapping
from typing import Any

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    first_command,
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
from flatout.diagnose.explain import explain_text
from flatout.schema.facts import TESTED_TORCH, untested_torch
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "torch"
SLOW_IMPORT_S = 15.0


def reinstall(snapshot: MachineSnapshot) -> str:
    """The command that reinstalls the same torch with its libraries."""
    installed = version(snapshot.distribution("torch"))
    return f"pip install --force-reinstall torch{f'=={dotted(installed)}' if installed else ''}"


@machine_check("FD010", THEME, ["run import torch"])
def torch_imports(snapshot: MachineSnapshot) -> CheckOutcome:
    """`import torch` works.

    No training runs without torch. The import runs in a child process with a time limit, so that a crash or a
    hang is told apart from a missing torch.
    """
    run, stages = snapshot.command_results["import torch"], snapshot.torch
    found, imported, failed = stages.get("found"), stages.get("imported"), stages.get("import failed")
    tail = [line for line in run.output.splitlines() if line.strip()][-4:]
    if isinstance(failed, dict):
        return _failed(failed, snapshot)
    if isinstance(found, dict) and not found.get("origin") and not found.get("places"):
        if snapshot.distribution("torch"):
            return problem("torch is listed as installed, but its files are missing", reinstall(snapshot))
        return problem("torch is not installed for this Python", "pip install torch")
    if isinstance(imported, dict):
        return _imported(imported, snapshot)
    if run.timed_out:
        return problem(
            "`import torch` did not finish within the time limit: a slow disk, or a driver that does not answer",
            "python -X faulthandler -c 'import torch'",
            tail,
        )
    if run.code is not None and run.code < 0:
        name = signal.Signals(-run.code).name if -run.code in set(signal.Signals) else f"signal {-run.code}"
        why = ": the processor lacks an instruction of this build" if name == "SIGILL" else ""
        return problem(f"`import torch` was ended by {name}{why}", reinstall(snapshot), tail)
    if run.code:
        return problem(
            f"the child process that imports torch ended before the import: {tail[-1] if tail else f'exit code {run.code}'}",
            "python -c 'import torch'",
            tail,
        )
    return not_checked("the child process that imports torch wrote nothing")


def _imported(imported: dict[str, Any], snapshot: MachineSnapshot) -> CheckOutcome:
    file, took_s = imported.get("file"), imported.get("import_s")
    if file is None:
        return problem(
            "`import torch` found an empty folder named torch instead of torch",
            "pip install --force-reinstall torch",
        )
    build_error = (snapshot.torch.get("build") or {}).get("raised")
    if build_error:
        return problem(
            f"the module that `import torch` found at {file} is not torch: {build_error}", reinstall(snapshot)
        )
    if not isinstance(took_s, (int, float)):
        return not_checked("the import time was not recorded")
    if took_s > SLOW_IMPORT_S:
        return warning(
            f"`import torch` took {took_s:.0f} s from {file}: its folder is on a slow disk",
            "python -m venv /tmp/venv && /tmp/venv/bin/pip install torch",
        )
    return ok(f"imported from {file} in {took_s:.1f} s")


def _failed(failed: dict[str, Any], snapshot: MachineSnapshot) -> CheckOutcome:
    """The cause according to the message, first of the loader, then of Python."""
    message, kind = str(failed.get("message", "")), str(failed.get("kind", ""))
    trace = str(failed.get("traceback", ""))
    lines = [line for line in trace.splitlines() if line.strip() and set(line.strip()) != {"^"}]
    frames = [number for number, line in enumerate(lines) if line.startswith('  File "')]
    evidence = lines[frames[-1] :][:6] if frames else lines[-6:]  # the innermost frame and the exception
    for explanation in explain_text(trace):
        command = first_command(explanation.finding)
        if command.startswith("pip install --force-reinstall torch"):
            command = reinstall(snapshot)  # of the same version
        return problem(explanation.finding.message, command, evidence)
    first = next((line.strip() for line in message.splitlines() if line.strip()), "no message").rstrip(":.")
    return problem(f"`import torch` raised {kind or 'an error'}: {first}", reinstall(snapshot), evidence)


@machine_check("FD011", THEME, ["packages"])
def torch_version(snapshot: MachineSnapshot) -> CheckOutcome:
    """flatout supports this torch release.

    flatout hooks into the installed torch. It is tested with torch 2.11 to 2.14. An older torch lacks the
    hooks. A newer one is used as it is, and the version table has no data on it.
    """
    build = snapshot.torch.get("build")
    text = build.get("version") if isinstance(build, dict) else snapshot.distribution("torch")
    installed, table = version(text), versions()
    if installed is None:
        return not_checked("torch's version could not be read" if text else "torch is not installed")
    if warning_text := untested_torch(str(text)):
        return note(warning_text, "pip install --upgrade flatout")
    if installed[:2] < table.torch_min:
        return warning(
            f"torch {text}; flatout is tested with {dotted(table.torch_min)} to {dotted(TESTED_TORCH)}",
            f'pip install "torch>={dotted(table.torch_min)}"',
        )
    return ok(f"torch {text}")


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

    A CPU build on a machine with a GPU trains on the processor, tens of times slower, or stops with "Torch
    not compiled with CUDA enabled".
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
            "the CPU build is several GB smaller"
        )
    if gpu is None:
        return not_checked(
            f"torch {build['version']} was built for {f'CUDA {cuda}' if cuda else 'the CPU'}; whether there is a GPU could not be determined"
        )
    return ok(f"torch {build['version']}, built for {f'CUDA {cuda}' if cuda else 'the CPU'}")


@machine_check("FD018", THEME, ["torch libraries", "python path"])
def loaded_libraries(snapshot: MachineSnapshot) -> CheckOutcome:
    """The loaded CUDA libraries are torch's own, with a single OpenMP.

    LD_LIBRARY_PATH or LD_PRELOAD can replace the library that torch was tested with by another CUDA's: wrong
    versions, missing symbols, slow kernels. Two OpenMP runtimes in one process create twice as many threads
    as there are cores.
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
            f"{foreign[0]} was loaded, but it is not torch's own",
            'echo "$LD_LIBRARY_PATH"',
            foreign,
        )
    runtimes = sorted({match[0] for p in paths if (match := re.search(r"lib(gomp|iomp5|omp)\b", p))})
    copies = [p for p in paths if re.search(r"lib(gomp|iomp5|omp)\b", p)]
    if len(runtimes) > 1:
        return note(f"two OpenMP runtimes are loaded: {', '.join(runtimes)}", evidence=copies)
    cuda = [p for p in paths if "libcudart" in p]
    return ok(f"libcudart from {cuda[0]}" if cuda else "no CUDA library is loaded, and none is needed")
