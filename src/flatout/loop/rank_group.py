"""The ranks that write a checkpoint together.

The first rank's decision reaches all ranks, and all ranks checkpoint or stop after the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.loop.ranks import exchanged, gathered_info, group_of, largest
from flatout.schema.errors import SaveError

if TYPE_CHECKING:
    from torch.nn import Module

STARTED_AGAIN = "start the same command again to resume from the last checkpoint."


class RankGroup:
    """The ranks and their CPU group, which all Loops of these ranks share."""

    def __init__(self, torch: ModuleType, members: Sequence[int]) -> None:
        self.torch, self.members = torch, list(members)
        self.rank, self.ranks = self.members.index(torch.distributed.get_rank()), len(members)
        self._group = group_of(torch.distributed, tuple(members))

    def metadata(self, words: object) -> Any:
        """Broadcast a JSON value from the first rank."""
        return self._gathered_info(words if self.rank == 0 else None)[0]

    def all_fine(self, error: Exception | None) -> None:
        """Raises this rank's error, or SaveError with another rank's: one rank continues only if all do."""
        found = self._gathered_info(f"{error}" if error is not None else "")
        if error is not None:
            raise error
        for rank, words in zip(self.members, found, strict=True):
            if words:
                raise SaveError(f"rank {rank} cannot resume from the checkpoint, so all ranks stop: {words}")

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """The maximum of each number over all ranks."""
        found: list[int] = exchanged(lambda: largest(self.torch, self._group, numbers), STARTED_AGAIN)
        return found

    def _gathered_info(self, what: object) -> list[Any]:
        found: list[Any] = exchanged(
            lambda: gathered_info(self.torch, self._group, self.ranks, what), STARTED_AGAIN
        )
        return found


def company_of(torch: ModuleType, model: Module) -> RankGroup | None:
    """The ranks of this training; None for a single process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.is_gloo_available()):
        return None
    parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    members = distributed.get_process_group_ranks(model.process_group if parallel else None)
    return RankGroup(torch, members) if len(members) > 1 else None
