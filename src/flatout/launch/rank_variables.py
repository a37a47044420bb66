"""The environment of a rank: its number, device and share of the cores."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.job.rank_environment import RankEnvironment, launcher_variables
from flatout.launch.timed_commands import TimedCommand
from flatout.schema.errors import UsageError

DEVICES = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_S = 20.0  # without persistence mode, nvidia-smi wakes every GPU first


def rank_environment(
    environment: Mapping[str, str],
    rank: int,
    procs: int,
    folder: Path,
    *,
    device: str | None = None,
    cores: int | None = None,
) -> dict[str, str]:
    """Return ``environment`` for one of ``procs`` ranks of this machine, which meet at a file in ``folder``.

    ``device`` is the one CUDA device that this rank sees. ``cores`` are shared between the ranks.
    """
    hidden = launcher_variables(environment)
    own = {name: value for name, value in environment.items() if name not in hidden}
    own |= RankEnvironment(rank, rank, procs, procs, f"file://{folder}/rendezvous").environment()
    own |= launch_environment(folder) | share_of_cores(environment, procs, cores)
    return own if device is None else own | {DEVICES: device}


def launch_environment(folder: Path) -> dict[str, str]:
    """Return the variables of every rank that this process starts. ``folder`` is that of the launch."""
    return {
        "FLATOUT_LAUNCHER": str(os.getpid()),
        "FLATOUT_LAUNCH": str(folder),
        "FLATOUT_CRASH_REPORTS": str(folder / "info"),
        "FLATOUT_FIRST": "",
    }


def share_of_cores(environment: Mapping[str, str], procs: int, cores: int | None = None) -> dict[str, str]:
    """Return the number of threads of a rank, unless the user has set one. By default all cores are shared."""
    if environment.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max((cores_here() if cores is None else cores) // procs, 1))}


def cuda_devices(environment: Mapping[str, str], procs: int) -> list[str]:
    """Return one device for each of ``procs`` ranks.

    Takes those that CUDA_VISIBLE_DEVICES lists (numbers, UUIDs, parts of a GPU), otherwise all. Raises
    UsageError."""
    listed = environment.get(DEVICES)
    there = _gpus()
    found = _listed(listed, there) if listed is not None else [str(number) for number in range(there)]
    if len(found) >= procs:
        return found[:procs]
    where = "on this machine" if listed is None else f"in {DEVICES}={listed!r}"
    said = (
        f"there is one CUDA device {where}"
        if len(found) == 1
        else f"there are {len(found) or 'no'} CUDA devices {where}"
    )
    instead = (
        f"`--gpus {len(found)}`"
        if found
        else "`--procs N` runs the ranks on the CPU; `flatout doctor` says why no GPU is available"
    )
    raise UsageError(
        f"{said}, and {procs} ranks need one each. {instead}{'' if listed is None or not found else f', or list more in {DEVICES}'}."
    )


def _listed(text: str, there: int) -> list[str]:
    """Return the listed devices. CUDA stops at the first invalid entry: `0,1,-1,2` shows two devices.

    Source: CUDA programming guide, environment variables. ``there`` is the number of GPUs of the machine; 0
    means unknown, because device files and nvidia-smi may be missing.
    """
    found: list[str] = []
    for entry in (word.strip() for word in text.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))) or entry in found:
            break
        if entry.isdigit() and there and int(entry) >= there:
            break
        found.append(entry)
    return found


def _gpus() -> int:
    """Count the GPUs of this machine or container by their device files, else (on WSL) with nvidia-smi."""
    files = glob.glob("/dev/nvidia[0-9]*")
    if files:
        return len(files)
    said = TimedCommand(["nvidia-smi", "-L"]).answer(NVIDIA_SMI_S)
    return sum(line.startswith("GPU ") for line in said.out.splitlines()) if said.code == 0 else 0


def cores_here() -> int:
    """Return the number of usable cores, ignoring cgroup quotas (``probe.machine`` reads those)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_each(devices: Sequence[str], procs: int) -> Sequence[str]:
    """Raise UsageError if there are fewer devices than ranks."""
    if len(devices) < procs:
        raise UsageError(
            f"{procs} ranks need one device each, but {len(devices)} given ({', '.join(devices) or 'none'}). Give more, or start fewer ranks."
        )
    return devices
