"""The environment of a rank: its number, device and share of the cores."""

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from flatout.job.rank_environment import RankEnvironment, launcher_variables
from flatout.launch.process import TimedCommand
from flatout.measure.cores import usable_cores
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
    variables = {name: value for name, value in environment.items() if name not in hidden}
    variables |= RankEnvironment(rank, rank, procs, procs, f"file://{folder}/rendezvous").environment()
    variables |= launch_environment(folder) | share_of_cores(environment, procs, cores)
    return variables if device is None else variables | {DEVICES: device}


def launch_environment(folder: Path) -> dict[str, str]:
    """The variables of every rank that this process starts. ``folder`` is that of the launch."""
    return {
        "FLATOUT_LAUNCHER": str(os.getpid()),
        "FLATOUT_LAUNCH": str(folder),
        "FLATOUT_CRASH_REPORTS": str(folder / "info"),
        "FLATOUT_FIRST": "",
    }


def share_of_cores(environment: Mapping[str, str], procs: int, cores: int | None = None) -> dict[str, str]:
    """The number of threads of a rank, unless the user has set one. By default all cores are shared."""
    if environment.get("OMP_NUM_THREADS"):
        return {}
    return {"OMP_NUM_THREADS": str(max((usable_cores() if cores is None else cores) // procs, 1))}


def cuda_devices(environment: Mapping[str, str], procs: int) -> list[str]:
    """One device for each of ``procs`` ranks.

    Takes those that CUDA_VISIBLE_DEVICES lists (numbers, UUIDs, parts of a GPU), otherwise all. Raises
    UsageError."""
    listed = environment.get(DEVICES)
    gpu_count = _gpus()
    devices = (
        _listed(listed, gpu_count) if listed is not None else [str(number) for number in range(gpu_count)]
    )
    if len(devices) >= procs:
        return devices[:procs]
    where = "on this machine" if listed is None else f"in {DEVICES}={listed!r}"
    problem = (
        f"there is one CUDA device {where}"
        if len(devices) == 1
        else f"there are {len(devices) or 'no'} CUDA devices {where}"
    )
    advice = (
        f"`--gpus {len(devices)}`"
        if devices
        else "`--procs N` runs the ranks on the CPU; `flatout doctor` says why no GPU is available"
    )
    raise UsageError(
        f"{problem}, and {procs} ranks need one each. {advice}{'' if listed is None or not devices else f', or list more in {DEVICES}'}."
    )


def _listed(text: str, gpu_count: int) -> list[str]:
    """The listed devices. CUDA stops at the first invalid entry: `0,1,-1,2` shows two devices.

    Source: CUDA programming guide, environment variables. ``gpu_count`` is the number of GPUs of the machine; 0
    means unknown, because device files and nvidia-smi may be missing.
    """
    devices: list[str] = []
    for entry in (word.strip() for word in text.split(",")):
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))) or entry in devices:
            break
        if entry.isdigit() and gpu_count and int(entry) >= gpu_count:
            break
        devices.append(entry)
    return devices


def _gpus() -> int:
    files = glob.glob("/dev/nvidia[0-9]*")
    if files:
        return len(files)
    listing = TimedCommand(["nvidia-smi", "-L"]).result(NVIDIA_SMI_S)
    return sum(line.startswith("GPU ") for line in listing.out.splitlines()) if listing.code == 0 else 0


def check_devices(devices: Sequence[str], procs: int) -> Sequence[str]:
    """Raise UsageError if there are fewer devices than ranks."""
    if len(devices) < procs:
        raise UsageError(
            f"{procs} ranks need one device each, but {len(devices)} given ({', '.join(devices) or 'none'}). Give more, or start fewer ranks."
        )
    return devices
