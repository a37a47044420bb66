"""How to split a program over ranks: the value of the lever `data_parallel`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

MEAN, SUM = "mean", "sum"
INDEX, CUT, INPUT, WHOLE, SAME = "index", "cut", "input", "whole", "same"
OWN, ALL = "own", "all"
ACCEPTED = {
    "reduction": (MEAN, SUM),
    "batches": (INDEX, CUT, INPUT, WHOLE, SAME),
    "batchnorm": (OWN, ALL),
    "draws": (OWN, ALL),
}


@dataclass(frozen=True)
class SplitSettings:
    """How to split a program over ranks.

    ``loaders``: the indices of the training loaders, in the order in which the script makes them; text in a
    plan: "0,2".

    ``reduction``: the loss is a mean or a sum over samples.

    ``batches``: ``index`` splits by index before fetching, ``cut`` splits after fetching, ``input`` splits at
    the model's input. ``whole`` splits at the model's input and joins its outputs, so that the script sees
    whole batches and its loss may be anything. ``same`` does not split: every rank computes all of each
    batch, like one process.

    ``batchnorm``: statistics of each rank's share or of all. ``draws``: random numbers of each rank, or those
    of one process."""

    reduction: str = MEAN
    batches: str = INDEX
    loaders: tuple[int, ...] = (0,)
    batchnorm: str = OWN
    draws: str = OWN

    @classmethod
    def read(cls, value: Any) -> SplitSettings:
        """Read a value that the lever accepts."""
        loaders = str(value.get("loaders", "0")).split(",")
        return cls(
            **{name: value[name] for name in ACCEPTED if name in value},
            loaders=tuple(int(number) for number in loaders if number),
        )


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
