"""Which rank this process is, told by its environment; no torch is needed to know it.

    FLATOUT_RANK, FLATOUT_LOCAL_RANK, FLATOUT_WORLD_SIZE, FLATOUT_LOCAL_WORLD_SIZE    numbers
    FLATOUT_MEETING    where the ranks meet: ``file:///folder/meeting`` (a torch FileStore), or ``tcp://host:port`` (a torch TCPStore that
                       somebody else serves: all ranks are its clients)

A program that flatout divides believes to be alone. Where torchrun's agent has started it, what the agent sets (RANK, MASTER_ADDR, TORCHELASTIC_*) is
therefore translated into these words and taken out of the environment, before the program's first line.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

NAMES = {"rank": "FLATOUT_RANK", "local_rank": "FLATOUT_LOCAL_RANK", "world_size": "FLATOUT_WORLD_SIZE", "local_world_size": "FLATOUT_LOCAL_WORLD_SIZE"}
MEETING = "FLATOUT_MEETING"
# What an elastic agent sets in each worker (torch/distributed/elastic/agent/server/local_elastic_agent.py, torch 2.11-2.14), and what only its library
# reads. TORCH_NCCL_ASYNC_ERROR_HANDLING stays: it is torch's own default, and a group of ours wants it, too.
OF_THE_AGENT = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME",
                "MASTER_ADDR", "MASTER_PORT")
PREFIX = "TORCHELASTIC_"


@dataclass(frozen=True)
class Standing:
    """A rank among ``world_size``, the ``local_rank``-th of ``local_world_size`` on its machine."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    meeting: str


def standing(environment: MutableMapping[str, str] | None = None) -> Standing | None:
    """Where this process stands, or None where it is the only one."""
    found = os.environ if environment is None else environment
    if MEETING not in found or not all(name in found for name in NAMES.values()):
        return None
    return Standing(**{field: int(found[name]) for field, name in NAMES.items()}, meeting=found[MEETING])


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
    environment.update({name: str(getattr(told, field)) for field, name in NAMES.items()} | {MEETING: told.meeting})
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
        _end_with(int(agent))
    folder = environment.get("FLATOUT_GANG")
    if told.rank and folder:
        log = os.open(os.path.join(folder, f"rank{told.rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
    return told


def _end_with(parent: int) -> None:
    """This process is ended when its parent is: SIGKILL of torchrun leaves every worker running (measured with torch 2.14)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was already over
            os._exit(128 + signal.SIGKILL)


def store(torch: Any, where: Standing, timeout_s: float) -> Any:
    """The torch store at which the ranks of ``where`` meet. Raises torch's DistError where it cannot be reached within the timeout."""
    timeout = type(torch.distributed.constants.default_pg_timeout)(seconds=timeout_s)  # a datetime.timedelta, without the clocks of its module
    place = urlsplit(where.meeting)
    if place.scheme == "file":
        found = torch.distributed.FileStore(place.path, where.world_size)
        found.set_timeout(timeout)
        return found
    if place.scheme != "tcp" or not place.hostname or not place.port:
        raise ValueError(f"{MEETING}={where.meeting} is no place that ranks can meet at: file:///path or tcp://host:port")
    return torch.distributed.TCPStore(place.hostname, place.port, is_master=False, timeout=timeout, wait_for_workers=False)
