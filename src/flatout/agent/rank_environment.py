"""Translates torchrun's environment variables: a script that flatout parallelises must see a single process.

If torchrun's agent started the process, the agent's variables (RANK, MASTER_ADDR, TORCHELASTIC_*) are
translated into flatout's own and removed from the environment, before the first line of the script.
TORCH_NCCL_ASYNC_ERROR_HANDLING stays: flatout's process groups need this default of torch, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import MutableMapping

from flatout.job.parent_exit import die_with_parent
from flatout.job.rank_environment import RankEnvironment, of_other_launchers


def from_torchrun(environment: MutableMapping[str, str], one_device: bool = False) -> RankEnvironment | None:
    """Translate the variables of torchrun's agent, in place.

    Outside an agent, return None and change nothing.

    ``one_device`` leaves each rank one of the visible CUDA devices, which it sees as device 0. Raises
    ValueError if there are fewer devices than ranks, or if the agent provides no store for the rendezvous of
    the ranks.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError(
            "this torchrun agent provides no store for its ranks (static rendezvous, or TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). "
            "Start the ranks with `flatout run --nodes ...`, or unset the variable"
        )
    host = environment["MASTER_ADDR"]
    info = RankEnvironment(
        int(environment["RANK"]),
        int(environment["LOCAL_RANK"]),
        int(environment["WORLD_SIZE"]),
        int(environment["LOCAL_WORLD_SIZE"]),
        f"tcp://{f'[{host}]' if ':' in host else host}:{environment['MASTER_PORT']}",
    )
    if one_device:
        environment["CUDA_VISIBLE_DEVICES"] = own_device(
            environment.get("CUDA_VISIBLE_DEVICES"), info.local_rank
        )
    for name in of_other_launchers(environment):
        del environment[name]
    environment.update(info.environment())
    return info


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
    """Turn a process of a parallelised script into its rank; a process without an agent stays as it is.

    All ranks except rank 0 write their output to a file in FLATOUT_LAUNCH, the agent's folder. Otherwise each
    output line of the script would appear once per rank.
    """
    info = from_torchrun(environment, environment.get("FLATOUT_DATA_PARALLEL") == "gpus")
    if info is None:
        return None
    agent = environment.get("FLATOUT_LAUNCHER")
    if agent == str(os.getppid()):
        die_with_parent()
        if os.getppid() != int(agent):  # the agent has ended already
            os._exit(128 + signal.SIGKILL)
    folder = environment.get("FLATOUT_LAUNCH")
    if info.rank and folder:
        log = os.open(
            os.path.join(folder, f"rank{info.rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
    return info
