"""What the ranks of a program tell rank 0, over the store by which they found each other.

No collective is added to a group of the program: a note is written without waiting, and read when it is there.
"""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

MAX_RANKS = 8  # that are compared
PREFIX = "flatout/notes"


class RankNotes:
    def __init__(self, torch: ModuleType, topic: str) -> None:
        self.torch, self.topic = torch, topic
        self.rank, self.ranks = 0, 1
        self._store: Any = None
        self.waiting: dict[str, Any] = {}  # rank 0's own notes, by name
        self._received: dict[tuple[str, int], Any] = {}

    def tell(self, name: str, value: Any) -> None:
        """Note something that can be compared over the ranks, as JSON."""
        if not self._ready():
            return
        if self.rank == 0:
            self.waiting[name] = value
        elif self.rank < MAX_RANKS:
            self._store.set(self._key(name, self.rank), json.dumps(value))

    def received(self) -> list[tuple[str, list[Any]]]:
        """The names that all ranks have told since the last call, each with the values by rank."""
        complete: list[tuple[str, list[Any]]] = []
        if not self._ready():
            return complete
        for name, own in list(self.waiting.items()):
            others = [self._of(name, rank) for rank in range(1, min(self.ranks, MAX_RANKS))]
            if None not in others:
                del self.waiting[name]
                complete.append((name, [own, *others]))
        return complete

    def _of(self, name: str, rank: int) -> Any:
        key = self._key(name, rank)
        if (name, rank) not in self._received and self._store.check([key]):
            self._received[name, rank] = json.loads(self._store.get(key))
        return self._received.get((name, rank))

    def _ready(self) -> bool:
        distributed = self.torch.distributed
        if not (distributed.is_available() and distributed.is_initialized()):
            return False
        if self._store is None:
            self.rank, self.ranks = distributed.get_rank(), distributed.get_world_size()
            if self.ranks > 1:
                self._store = distributed.distributed_c10d._get_default_store()
        return self._store is not None

    def _key(self, name: str, rank: int) -> str:
        return f"{PREFIX}/{self.topic}/{name}/{rank}"


def replicas_in(torch: ModuleType, roots: list[Any]) -> list[Any]:
    """The modules that exchange their gradients between all ranks, as they are: without a hook of the program's own."""
    kind = torch.nn.parallel.DistributedDataParallel
    return [
        root
        for root in roots
        if isinstance(root, kind)
        and root.process_group.size() == torch.distributed.get_world_size()
        and not getattr(root, "_comm_hooks", None)
    ]
