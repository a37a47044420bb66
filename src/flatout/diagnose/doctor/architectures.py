"""The check that this build of torch has kernels for the GPUs."""

from __future__ import annotations

import re

from flatout.diagnose.doctor.check import (
    CheckOutcome,
    dotted,
    machine_check,
    not_seen,
    note,
    ok,
    problem,
    version,
)
from flatout.diagnose.doctor.nvidia_smi import listing
from flatout.diagnose.doctor.torch_build import build_of
from flatout.diagnose.doctor.versions import TorchRelease, versions
from flatout.schema.machine_snapshot import MachineSnapshot

THEME = "driver"


@machine_check("FD023", THEME, gpu=True)
def architectures(snapshot: MachineSnapshot) -> CheckOutcome:
    """This build of torch has kernels for the GPUs.

    Why it matters:
        A GPU runs machine code for its own major architecture, or PTX that is not newer than the GPU. If a
        build has neither, the first operation fails with "no kernel image is available for execution on the
        device".
    How to fix it:
        Install the build of the same torch for the architecture, with the given command.
    """
    build, seen = build_of(snapshot), listing(snapshot)
    devices = _devices(snapshot)
    if not devices:
        return not_seen(
            "the compute capability of the GPUs could not be determined"
            + (
                ""
                if seen and seen.driver and (version(seen.driver) or ()) >= (510,)
                else "; drivers before 510 do not report it"
            )
        )
    if build is None:
        return not_seen("the installed build of torch could not be determined")
    if build.get("cuda") is None:
        return note(f"torch {build['version']} is a CPU build")
    archs = _archs(snapshot, str(build["version"]), str(build["cuda"]))
    if archs is None:
        return not_seen(f"the architectures of torch {build['version']} could not be determined")
    for name, capability in devices:
        fit = _fit(capability, archs)
        if fit == "none":
            return problem(
                f"{name} has compute capability {dotted(capability)}, and torch {build['version']} (CUDA {build['cuda']}) has code only for "
                f"{', '.join(archs)}",
                _another_build(versions().release(str(build["version"])), str(build["version"]), capability),
            )
        if fit == "ptx":
            return note(
                f"{name} ({dotted(capability)}) is newer than this build of torch: kernels are compiled from PTX at first use",
                "pip install --upgrade torch",
            )
    return ok(
        f"code for {', '.join(dict.fromkeys(dotted(capability) for _, capability in devices))} is in this build"
    )


def _devices(snapshot: MachineSnapshot) -> list[tuple[str, tuple[int, int]]]:
    seen, torch = listing(snapshot), snapshot.torch.get("cuda")
    found = [(board.name, board.capability) for board in seen.boards if board.capability] if seen else []
    if not found and isinstance(torch, dict):
        for device in torch.get("devices") or ():
            pair = device.get("capability") if isinstance(device, dict) else None
            if isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, int) for part in pair):
                found.append((str(device.get("name")), (pair[0], pair[1])))
    return found


def _archs(snapshot: MachineSnapshot, torch: str, cuda: str) -> list[str] | None:
    """The architectures listed by torch ("sm_80", "compute_120") or by the table ("8.0", "12.0+PTX")."""
    seen = snapshot.torch.get("cuda")
    listed = seen.get("archs") if isinstance(seen, dict) else None
    if isinstance(listed, list) and listed:
        return [str(arch) for arch in listed]
    release = versions().release(torch)
    build = release.build(cuda) if release else None
    return list(build.capabilities) if build and build.capabilities else None


def _code(arch: str) -> tuple[tuple[int, int], bool] | None:
    """The capability of "sm_86", "compute_120", "sm_90a", "8.6" or "12.0+PTX", and whether it is PTX."""
    short, long = (
        re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", arch),
        re.fullmatch(r"(\d+)\.(\d)(\+PTX)?", arch),
    )
    if short:
        return (int(short[2]), int(short[3])), short[1] == "compute"
    return ((int(long[1]), int(long[2])), bool(long[3])) if long else None


def _fit(capability: tuple[int, int], archs: list[str]) -> str:
    """ "code", "ptx" or "none". Code fits its major version from its minor on, PTX anything not older."""
    codes = [code for arch in archs if (code := _code(arch))]
    if any(not ptx and have[0] == capability[0] and have[1] <= capability[1] for have, ptx in codes):
        return "code"
    return "ptx" if any(ptx and have <= capability for have, ptx in codes) else "none"


def _another_build(release: TorchRelease | None, torch: str, capability: tuple[int, int]) -> str:
    for build in reversed(release.builds if release else ()):
        if build.capabilities and _fit(capability, list(build.capabilities)) != "none":
            return versions().install(torch, build.tag)
    return (
        "pip install --upgrade torch"
        if capability >= (7, 5)
        else 'pip install "torch<2.11" --index-url https://download.pytorch.org/whl/cu126'
    )
