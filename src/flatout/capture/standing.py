"""From torchrun's words to ours: a program that flatout divides believes to be alone.

Where torchrun's agent has started it, what the agent sets (RANK, MASTER_ADDR, TORCHELASTIC_*) is
therefore translated into these words and taken out of the environment, before the program's first line.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import MutableMapping

from flatout.plan.standing import Standing

# What an elastic agent sets in each worker (torch/distributed/elastic/agent/server/local_elastic_agent.py, torch 2.11-2.14), and what only its library
# reads. TORCH_NCCL_ASYNC_ERROR_HANDLING stays: it is torch's own default, and a group of ours wants it, too.
OF_THE_AGENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
                "MASTER_ADDR", "MASTER_PORT")
PREFIX = "TORCHELASTIC_"


def from_torchrun(environment: MutableMapping[str, str], one_device: bool = False) -> Standing | None:
    """Translate what torchrun's agent has set, in place. None, and nothing is touched, where this is not a process of an agent.

    ``one_device`` leaves each rank one of the visible CUDA devices, which it knows as device 0.
    Raises ValueError where there are fewer devices than ranks, or the agent serves no store that the ranks could meet at.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "RANK" not in environment:
        return None
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise ValueError("this torchrun agent serves no store for its ranks (static rendezvous, or TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1). "
                         "Start the ranks with `flatout run --nodes ...`, or leave the variable away")
    host = environment["MASTER_ADDR"]
    told = Standing(int(environment["RANK"]), int(environment["LOCAL_RANK"]), int(environment["WORLD_SIZE"]), int(environment["LOCAL_WORLD_SIZE"]),
                    f"tcp://{f'[{host}]' if ':' in host else host}:{environment['MASTER_PORT']}")
    if one_device:
        environment["CUDA_VISIBLE_DEVICES"] = own_device(environment.get("CUDA_VISIBLE_DEVICES"), told.local_rank)
    for name in [name for name in environment if name in OF_THE_AGENT or name.startswith(PREFIX)]:
        del environment[name]
    environment.update(told.environment())
    return told


def own_device(visible: str | None, local_rank: int) -> str:
    """The entry of CUDA_VISIBLE_DEVICES for one rank of a machine: a number, or a UUID that was given. Raises ValueError where there is none left."""
    if visible is None:
        return str(local_rank)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    if local_rank >= len(entries):
        raise ValueError(f"rank {local_rank} of this machine has no device: CUDA_VISIBLE_DEVICES={visible} names {len(entries)}. "
                         f"Start fewer ranks (--gpus {len(entries)}), or make more devices visible")
    return entries[local_rank]


def enter(environment: MutableMapping[str, str]) -> Standing | None:
    """What a process of a divided program does before anything else: it becomes its rank, or nothing happens where it is none of an agent's.

    All but rank 0 write into a file of FLATOUT_GANG, the agent's folder: each line of the program would otherwise be there once a rank.
    """
    told = from_torchrun(environment, environment.get("FLATOUT_DIVIDED") == "gpus")
    if told is None:
        return None
    agent = environment.get("FLATOUT_LAUNCHER")
    if agent == str(os.getppid()):
        die_with_parent()
        if os.getppid() != int(agent):  # it was already over
            os._exit(128 + signal.SIGKILL)
    folder = environment.get("FLATOUT_GANG")
    if told.rank and folder:
        log = os.open(os.path.join(folder, f"rank{told.rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
    return told


def die_with_parent() -> None:
    """This process is ended when its parent is. SIGKILL of torchrun leaves every worker running (measured with torch 2.14), and ranks and loader workers
    of a trial that is killed while it is stopped would stay for ever (prctl(2), PR_SET_PDEATHSIG)."""
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux
        pass
