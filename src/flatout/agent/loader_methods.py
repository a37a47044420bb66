"""Patches of DataLoaders and their iterators, for all that count, divide, replace or observe batches.

It imports little, because every run loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.schema.program import Ledger

# what is wrapped -> class below torch.utils.data, method
METHODS = {
    "making": ("DataLoader", "__init__"),
    "epoch": ("DataLoader", "__iter__"),
    "iterator": ("dataloader._BaseDataLoaderIter", "__init__"),
    "batch": ("dataloader._BaseDataLoaderIter", "__next__"),
    "indices": ("dataloader._BaseDataLoaderIter", "_next_index"),
    "next epoch": ("dataloader._MultiProcessingDataLoaderIter", "_reset"),
}


def wrap_loader_method(
    torch: ModuleType, what: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]], ledger: Ledger
) -> None:
    """Wrap one of ``METHODS`` of all DataLoaders, until the ledger is restored."""
    path, name = METHODS[what]
    owner: Any = attrgetter(path)(torch.utils.data)
    original = getattr(owner, name)
    ledger.set(owner, name, wraps(original)(wrap(original)))
