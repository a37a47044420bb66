"""Why a program has no ranks started by flatout, and why its own DistributedDataParallel is not changed.

It has its own process group, another launcher started it, or it is a single process.
"""

import os
from types import ModuleType
from typing import Any

FLATOUT_RANKS_ONLY = "this lever acts only on ranks that `flatout run --procs N` starts"
OWN_GROUP = "the program created its own torch.distributed process group, and {only}"
OTHER_LAUNCHER = "another launcher started this process (WORLD_SIZE={size}), and {only}"
ONE_RANK = "the program's DistributedDataParallel has one rank, so nothing is exchanged"
OWN_HOOK = "the script has registered its own communication hook, which stays"
ONE_PROCESS = "flatout started the program as one process; `flatout run --procs N` starts it as N ranks"


def why_not_split(torch: ModuleType, only: str = FLATOUT_RANKS_ONLY) -> str:
    """Why ``data_parallel`` does not split this process. ``only``: the ranks on which the lever acts."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return OWN_GROUP.format(only=only)
    # Of torchrun, accelerate and others; the group comes later, or never
    size = os.environ.get("WORLD_SIZE", "")
    return OTHER_LAUNCHER.format(size=size, only=only) if size.isdigit() and int(size) > 1 else ONE_PROCESS


def why_not_hookable(ddps: list[Any]) -> str:
    """Why no hook can be registered with the script's DistributedDataParallel modules, or "".

    Equal on every rank."""
    for ddp in ddps:
        info = ddp._get_ddp_logging_data()
        if info["world_size"] < 2:
            return ONE_RANK
        if info.get("comm_hook"):
            return OWN_HOOK
    return ""
