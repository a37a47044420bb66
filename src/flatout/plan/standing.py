"""Which rank this process is, told by its environment; no torch is needed to know it.

    FLATOUT_RANK, FLATOUT_LOCAL_RANK, FLATOUT_WORLD_SIZE, FLATOUT_LOCAL_WORLD_SIZE    numbers
    FLATOUT_MEETING    where the ranks meet: ``file:///folder/meeting`` (a torch FileStore), or ``tcp://host:port`` (a torch TCPStore that
                       somebody else serves: all ranks are its clients)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

NAMES = {"rank": "FLATOUT_RANK", "local_rank": "FLATOUT_LOCAL_RANK", "world_size": "FLATOUT_WORLD_SIZE", "local_world_size": "FLATOUT_LOCAL_WORLD_SIZE"}
MEETING = "FLATOUT_MEETING"


@dataclass(frozen=True)
class Standing:
    """A rank among ``world_size``, the ``local_rank``-th of ``local_world_size`` on its machine."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    meeting: str

    def environment(self) -> dict[str, str]:
        """What tells a process that it stands here."""
        return {name: str(getattr(self, field)) for field, name in NAMES.items()} | {MEETING: self.meeting}


def standing(environment: Mapping[str, str] | None = None) -> Standing | None:
    """Where this process stands, or None where it is the only one."""
    found = os.environ if environment is None else environment
    if MEETING not in found or not all(name in found for name in NAMES.values()):
        return None
    return Standing(**{field: int(found[name]) for field, name in NAMES.items()}, meeting=found[MEETING])
