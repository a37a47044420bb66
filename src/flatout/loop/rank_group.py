"""The ranks that train one model, and what they agree on when they write or read a checkpoint.

The first rank's decision reaches all ranks, and all ranks checkpoint or stop after the same step.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from flatout.schema.errors import CheckpointError, LoopError, first_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

# By the world group (destroying it drops its groups) and by members: a CPU group, which all Loops share.
GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def ranks_of(torch: ModuleType, model: Module) -> list[int]:
    """The ranks that train this model: those of its DistributedDataParallel, or all ranks.

    Empty for a single process."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return []
    parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    ranks = distributed.get_process_group_ranks(model.process_group if parallel else None)
    return ranks if len(ranks) > 1 else []


def rank_group_of(torch: ModuleType, model: Module) -> RankGroup | None:
    """The ranks of this training; None for a single process, or if torch has no gloo."""
    ranks = ranks_of(torch, model)
    return RankGroup(torch, ranks) if ranks and torch.distributed.is_gloo_available() else None


class RankGroup:
    """The ranks and their CPU group. Methods raise LoopError if a rank is missing."""

    def __init__(self, torch: ModuleType, members: Sequence[int]) -> None:
        self.torch, self.members = torch, list(members)
        self.rank, self.ranks = self.members.index(torch.distributed.get_rank()), len(members)
        self._group = _cpu_group(torch.distributed, tuple(members))

    def broadcast(self, value: object) -> Any:
        """A JSON value of the first rank."""
        return self._gather(value if self.rank == 0 else None)[0]

    def raise_if_any_failed(self, error: Exception | None) -> None:
        """Raises this rank's error, or CheckpointError with another rank's: one rank continues only if all do."""
        messages = self._gather(f"{error}" if error is not None else "")
        if error is not None:
            raise error
        for rank, message in zip(self.members, messages, strict=True):
            if message:
                raise CheckpointError(
                    f"rank {rank} cannot resume from the checkpoint, so all ranks stop: {message}"
                )

    def maxima(self, numbers: Sequence[int]) -> list[int]:
        """The maximum of each number over all ranks."""
        maxima: list[int] = self._maximum(self.torch.tensor(numbers, device="cpu")).tolist()
        return maxima

    def _gather(self, value: object) -> list[Any]:
        """One JSON value from each rank. torch's own object collectives use pickle, which executes what it receives."""
        torch, data = self.torch, json.dumps(value).encode()
        longest = self._maximum(torch.tensor(len(data), device="cpu"))
        padded = torch.frombuffer(bytearray(data.ljust(int(longest))), dtype=torch.uint8)
        gathered = [torch.empty_like(padded) for _ in range(self.ranks)]
        self._communicate(lambda: torch.distributed.all_gather(gathered, padded, group=self._group))
        return [json.loads(bytes(data.tolist())) for data in gathered]

    def _maximum(self, numbers: Tensor) -> Tensor:
        reduce, maximum = self.torch.distributed.all_reduce, self.torch.distributed.ReduceOp.MAX
        self._communicate(lambda: reduce(numbers, maximum, group=self._group))
        return numbers

    @staticmethod
    def _communicate(collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise LoopError(
                f"the ranks have lost each other ({first_line(error)}): one of them has ended, or did not respond within the group's "
                "timeout. Its own error message says why; start the same command again to resume from the last checkpoint."
            ) from None


def _cpu_group(distributed: ModuleType, members: tuple[int, ...]) -> Any:
    world = distributed.group.WORLD
    groups = GROUPS.setdefault(world, {})
    if members not in groups:
        backend = world._get_backend(world.bound_device_id or world._device_types[0])
        timeout = getattr(getattr(backend, "options", None), "_timeout", None)
        groups[members] = distributed.new_group(
            members, backend="gloo", timeout=timeout, use_local_synchronization=True
        )
    return groups[members]
