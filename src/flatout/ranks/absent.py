"""Why a program has no ranks that flatout started: it has a process group of its own, another launcher started it, or it is one process."""

from __future__ import annotations

import os
from typing import Any

ONLY_OURS = "this lever acts only on ranks that `flatout run --procs N` starts"
OWN_GROUP = f"the program has made a torch.distributed process group itself, and {ONLY_OURS}"
OTHER_LAUNCHER = f"another launcher started this process (WORLD_SIZE={{size}}), and {ONLY_OURS}"
ONE_PROCESS = "flatout started the program as one process; `flatout run --procs N` starts it as N ranks"


def why_none(torch: Any) -> str:
    """The reason, for a process that ``data_parallel`` does not divide."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return OWN_GROUP
    size = os.environ.get("WORLD_SIZE", "")  # torchrun, accelerate and others; the group is made later, or never
    return OTHER_LAUNCHER.format(size=size) if size.isdigit() and int(size) > 1 else ONE_PROCESS
