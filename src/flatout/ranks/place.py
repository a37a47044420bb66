"""Which of the ranks this process is, and how it meets the others. Told by whoever started it, in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

RANK, WORLD, LOCAL_RANK, LOCAL_WORLD, MEETING = ("FLATOUT_RANK", "FLATOUT_WORLD_SIZE", "FLATOUT_LOCAL_RANK", "FLATOUT_LOCAL_WORLD_SIZE", "FLATOUT_MEETING")


@dataclass(frozen=True)
class Place:
    """``meeting`` is ``file:///path`` or ``tcp://host:port``: the store of torch through which the ranks find each other."""

    rank: int
    world: int
    local_rank: int = 0
    local_world: int = 1
    meeting: str = ""

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> Place | None:
        """None where the program runs as one process."""
        world = int(environment.get(WORLD, "1"))
        if world < 2:
            return None
        return cls(int(environment[RANK]), world, int(environment.get(LOCAL_RANK, "0")), int(environment.get(LOCAL_WORLD, str(world))), environment[MEETING])

    def join(self, torch: Any, device_type: str, ledger: Any) -> None:
        """Meet the others. The script must not see it: what asks whether there are ranks would begin to divide by itself."""
        distributed = torch.distributed
        kind, _, where = self.meeting.partition("://")
        if kind == "file":
            store = distributed.FileStore(where, self.world)
        else:
            host, _, port = where.rpartition(":")
            store = distributed.TCPStore(host, int(port), self.world, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" and distributed.is_nccl_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=self.rank, world_size=self.world)
        ledger.call("process group", distributed.destroy_process_group)
        ledger.set(distributed, "is_initialized", lambda: False)
