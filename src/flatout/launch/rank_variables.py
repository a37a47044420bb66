"""The environment of a rank: its number, device and share of the cores, hidden from the script itself."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence

from flatout.job.rank_environment import RankEnvironment
from flatout.launch.timed_commands import TimedCommand
from flatout.schema.errors import UsageError

# Variables by which a distributed program finds other ranks: those of torchrun, Slurm's steps and MPI's
# launchers (Lightning, Accelerate, DeepSpeed and Transformers read them all).
OF_RANKS = frozenset(
    (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NODEID",
        "SLURM_NTASKS",
        "SLURM_NTASKS_PER_NODE",
        "PMI_RANK",
        "PMI_SIZE",
        "PMIX_RANK",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
    )
)
FAMILIES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_")
DEVICES = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI_S = 20.0  # without persistence mode, nvidia-smi wakes every GPU first


def rank_environment(
    environment: Mapping[str, str],
    *,
    rank: int,
    local_rank: int,
    world: int,
    local_world: int,
    rendezvous: str,
    local_launcher: str = "",
    device: str | None = None,
    cores: int | None = None,
) -> dict[str, str]:
    """Return ``environment`` for one rank.

    ``rendezvous`` is its address (``file:///path``, ``tcp://host:port``), ``local_launcher`` the folder of the launch.
    ``device`` is the one CUDA device that this rank sees. ``cores`` are shared between the local ranks,
    unless the user has set a number of threads.
    """
    own = {
        name: value
        for name, value in environment.items()
        if name not in OF_RANKS and not name.startswith(FAMILIES)
    }
    own |= RankEnvironment(rank, local_rank, world, local_world, rendezvous).environment()
    if local_launcher:
        own["FLATOUT_LAUNCH"] = local_launcher
    if device is not None:
        own[DEVICES] = device
    if cores is not None and not own.get("OMP_NUM_THREADS"):
        own["OMP_NUM_THREADS"] = str(max(cores // local_world, 1))
    return own


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
    return len(os.sched_getaffinity(0))


def one_each(devices: Sequence[str], procs: int) -> Sequence[str]:
    """Raise UsageError if there are fewer devices than ranks."""
    if len(devices) < procs:
        raise UsageError(
            f"{procs} ranks need one device each, but {len(devices)} given ({', '.join(devices) or 'none'}). Give more, or start fewer ranks."
        )
    return devices
