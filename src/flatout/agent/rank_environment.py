"""Translates torchrun's environment variables: a script that flatout parallelises must see a single process.

If torchrun started the process, its variables (RANK, MASTER_ADDR, TORCHELASTIC_*) are translated into flatout's
own and removed from the environment, before the first line of the script.
TORCH_NCCL_ASYNC_ERROR_HANDLING stays: flatout's process groups need this default of torch, too.
"""

import os
import signal
from collections.abc import MutableMapping

from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import RankEnvironment, launcher_variables

ERROR_FILE = "FLATOUT_ERROR_FILE"  # torchrun's report of a failed rank shows what is in it


def from_torchrun(environment: MutableMapping[str, str], one_device: bool = False) -> RankEnvironment | None:
    """Translate the variables of torchrun, in place.

    Outside torchrun, return None and change nothing.

    ``one_device`` leaves each rank one of the visible CUDA devices, which it sees as device 0. Raises
    ValueError if there are fewer devices than ranks, or if torchrun provides no store for the rendezvous of
    the ranks.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "torchrun provides no store for its ranks (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, or --rdzv-backend etcd). "
            "Unset the variable, and use --rdzv-backend c10d"
        )
    host = environment["MASTER_ADDR"]
    address = f"{f'[{host}]' if ':' in host else host}:{environment['MASTER_PORT']}"
    # torchrun counts a restart after a failure, but not one that admits a node
    attempt = f"{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}.{environment['WORLD_SIZE']}"
    rank_env = RankEnvironment(
        int(environment["RANK"]),
        int(environment["LOCAL_RANK"]),
        int(environment["WORLD_SIZE"]),
        int(environment["LOCAL_WORLD_SIZE"]),
        f"tcp://{address}/{attempt}",
    )
    if one_device:
        environment["CUDA_VISIBLE_DEVICES"] = own_device(
            environment.get("CUDA_VISIBLE_DEVICES"), rank_env.local_rank
        )
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    for name in launcher_variables(environment):
        del environment[name]
    environment.update(rank_env.environment() | ({ERROR_FILE: error_file} if error_file else {}))
    return rank_env


def own_device(visible: str | None, local_rank: int) -> str:
    """Return the CUDA_VISIBLE_DEVICES entry of one rank of a machine: a number or UUID.

    Raises ValueError if none is left.
    """
    if visible is None:
        return str(local_rank)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if local_rank >= len(entries):
        raise ValueError(
            f"rank {local_rank} of this machine has no device: CUDA_VISIBLE_DEVICES={visible} names {len(entries)}. "
            f"Start fewer ranks (--gpus {len(entries)}), or make more devices visible"
        )
    return entries[local_rank]


def enter(environment: MutableMapping[str, str]) -> RankEnvironment | None:
    """Turn a process of a parallelised script into its rank; a process outside torchrun stays as it is.

    All ranks except rank 0 write their output to a file in FLATOUT_LAUNCH, the folder of this node's launch.
    Otherwise each output line of the script would appear once per rank.
    """
    rank_env = from_torchrun(environment, environment.get("FLATOUT_DATA_PARALLEL") == "gpus")
    if rank_env is None:
        return None
    torchrun_pid = environment["FLATOUT_LAUNCHER"]
    if torchrun_pid == str(os.getppid()):
        die_with_parent()
        if os.getppid() != int(torchrun_pid):  # it has ended already
            os._exit(128 + signal.SIGKILL)
    if rank_env.rank:
        log = os.open(
            log_path(environment["FLATOUT_LAUNCH"], rank_env.rank),
            os.O_WRONLY | os.O_CREAT | os.O_APPEND,
            0o600,
        )
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
    return rank_env


def log_path(launch: str, rank: int) -> str:
    return os.path.join(launch, f"rank{rank}.log")
