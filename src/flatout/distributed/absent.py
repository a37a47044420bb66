"""Why a program has no ranks started by flatout, and why its own DistributedDataParallel is not changed.

It has its own process group, another launcher started it, or it is a single process.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

ONLY_OURS = "this lever acts only on ranks that `flatout run --procs N` starts"
OWN_GROUP = "the program created its own torch.distributed process group, and {only}"
OTHER_LAUNCHER = "another launcher started this process (WORLD_SIZE={size}), and {only}"
ONE_RANK = "the program's DistributedDataParallel has one rank, so nothing is exchanged"
OWN_HOOK = "the script has registered its own communication hook, which stays"
MADE_WITH = "the program's DistributedDataParallel uses {what}, which this lever does not support"
OUR_HOOK = "gradients sent by flatout"  # its name in torch
ONE_PROCESS = "flatout started the program as one process; `flatout run --procs N` starts it as N ranks"


def why_none(torch: ModuleType, only: str = ONLY_OURS) -> str:
    """Why ``data_parallel`` does not split this process. ``only``: the ranks on which the lever acts."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return OWN_GROUP.format(only=only)
    size = os.environ.get(
        "WORLD_SIZE", ""
    )  # torchrun, accelerate and others; the group comes later, or never
    return OTHER_LAUNCHER.format(size=size, only=only) if size.isdigit() and int(size) > 1 else ONE_PROCESS


def why_left_alone(ddps: list[Any]) -> str:
    """Why the exchange of the script's DistributedDataParallel modules cannot be changed, or "".

    Equal on every rank.
    """
    for ddp in ddps:
        if ddp._delay_all_reduce_params:
            return MADE_WITH.format(what="delay_all_reduce_named_params")
        info = ddp._get_ddp_logging_data()
        if info["world_size"] < 2:
            return ONE_RANK
        if info.get("comm_hook", OUR_HOOK) != OUR_HOOK:
            return OWN_HOOK
        parameters, sparse = ddp._build_params_for_reducer()
        unknown = {
            "mixed_precision": ddp.mixed_precision is not None,
            "skip_all_reduce_unused_params": getattr(ddp, "skip_all_reduce_unused_params", False),
            "sparse gradients": any(sparse),
            "the compiler's reducer": ddp._use_python_reducer,
            "parameters that were frozen later": len(parameters) != info["num_parameter_tensors"],
        }
        if any(unknown.values()):
            return MADE_WITH.format(what=next(name for name, given in unknown.items() if given))
    return ""
