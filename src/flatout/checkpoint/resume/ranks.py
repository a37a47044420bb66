"""The ranks of a program that is resumed exactly: each has its own checkpoints, all from the same moment."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

from flatout.agent.bootstrap import say_at_once
from flatout.checkpoint.save_schedule import SaveSchedule
from flatout.job.rank_environment import this_rank


class ResumeRanks:
    """The rank of this process among the ranks of one program. ``folder`` holds the checkpoints of rank 0."""

    def __init__(self, torch: ModuleType, rank: int, size: int, here: int, folder: Path) -> None:
        self.torch, self.rank, self.size, self.here = torch, rank, size, here
        self.folders = [folder if each == 0 else folder / f"rank-{each}" for each in range(size)]
        job = os.environ["FLATOUT_JOB"]
        self.claim = f"{job}.{rank}" if size > 1 else job
        self.prefix = f"rank {rank}: " if rank else ""

    @classmethod
    def of(cls, torch: ModuleType, folder: Path) -> ResumeRanks:
        names = os.environ
        if (here := this_rank()) is not None:
            return cls(torch, here.rank, here.world_size, here.local_world_size, folder)
        size = int(names.get("WORLD_SIZE") or 1)
        rank = int(names.get("RANK") or 0) if size > 1 else 0
        return cls(torch, rank, size, int(names.get("LOCAL_WORLD_SIZE") or size), folder)

    @property
    def folder(self) -> Path:
        """The folder for checkpoints of this rank."""
        return self.folders[self.rank]

    def say(self, sentence: str) -> None:
        """Print the sentence once for all ranks."""
        if self.rank == 0:
            say_at_once(sentence)

    def why_not(self) -> str:
        """Return why the ranks cannot be resumed, or ""."""
        if self.size == 1:
            return ""
        if this_rank() is not None:
            return "flatout runs it as several ranks (--procs)"
        if self.size != self.here:
            return "its ranks are on several machines"
        return "" if self.torch.distributed.is_available() else "this torch has no torch.distributed"

    def save_schedule(self) -> SaveSchedule | None:
        """Return the save schedule that the ranks share. Raises OSError.

        The ranks of one launch have the same parent."""
        if self.size == 1:
            return None
        return SaveSchedule(
            f"{os.environ['FLATOUT_JOB']}.{os.getppid()}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            leads=self.rank == 0,
        )
