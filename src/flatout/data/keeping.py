"""What may be kept of a data set's samples, and the proof that keeping them is safe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flatout.data.changes import DatasetState
from flatout.data.operation import NotBatchable
from flatout.data.shared_samples import SharedSamples
from flatout.data.source import spread
from flatout.data.store import PROVED, Store
from flatout.data.streams import same_states, states


@dataclass
class CacheBudget:
    """The memory that all feeds of a program together may still use."""

    left_bytes: int


@dataclass(frozen=True)
class CacheOptions:
    """How samples are kept: all before the first batch or as they come, with a folder for the overflow."""

    memory: CacheBudget
    ahead: bool = False
    folder: str | None = None
    handed_on: SharedSamples | None = None  # where the programs of a search share the samples kept ahead


def proved_store(
    copy: Any, fetched: Callable[[int], Any], keep: CacheOptions, shared: bool, own: Sequence[Any]
) -> Store:
    """Return a store, after checking that samples are the same each time. Raises NotBatchable if they are not.

    ``copy`` is a copy of the data set for inspection. ``fetched`` returns a sample of it in its kept form,
    and ``own`` holds its random generators.
    """
    length, before = len(copy), states(own)
    samples = {index: fetched(index) for index in spread(length, PROVED)}
    store = Store(next(iter(samples.values())), length, keep.memory.left_bytes, shared, keep.folder)
    if store.rows < min(length, PROVED):
        raise NotBatchable(
            f"a sample takes {store.row_bytes} bytes, and hardly any fits into the {keep.memory.left_bytes} that are left"
        )
    contents, attributes = DatasetState(copy), dict(getattr(copy, "__dict__", {}))
    for index, sample in samples.items():
        again = fetched(index)
        if not same_states(before, states(own)):
            raise NotBatchable("fetching a sample draws random numbers")
        torch.rand(1, device="cpu")  # a different generator state each time
        before = states(own)
        if index < store.rows:
            store.put([index], [sample])
            if not store.holds(index, again):
                raise NotBatchable("a sample is not the same each time it is fetched")
    now = getattr(copy, "__dict__", {})
    if (
        contents.changed()
        or now.keys() != attributes.keys()
        or any(now[name] is not value for name, value in attributes.items())
    ):
        raise NotBatchable("the data set changes each time a sample is fetched")
    keep.memory.left_bytes -= store.bytes
    return store
