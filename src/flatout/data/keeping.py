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
from flatout.data.store import TESTED_SAMPLES, Store
from flatout.data.streams import same_states, states


@dataclass
class CacheBudget:
    """The memory that all feeds of a program together may still use."""

    remaining_bytes: int


@dataclass(frozen=True)
class CacheOptions:
    """How samples are kept: all before the first batch or as they come, with a folder for the overflow."""

    memory: CacheBudget
    eager: bool = False
    folder: str | None = None
    shared_samples: SharedSamples | None = None  # where the programs of a search share the samples kept ahead


def tested_store(
    copy: Any, fetch: Callable[[int], Any], options: CacheOptions, shared: bool, rngs: Sequence[Any]
) -> Store:
    """A store, after checking that samples are the same each time. Raises NotBatchable if they are not.

    ``copy`` is a copy of the data set for inspection. ``fetch`` returns a sample of it in its kept form,
    and ``rngs`` holds its random generators.
    """
    length, before = len(copy), states(rngs)
    samples = {index: fetch(index) for index in spread(length, TESTED_SAMPLES)}
    store = Store(
        next(iter(samples.values())), length, options.memory.remaining_bytes, shared, options.folder
    )
    if store.rows < min(length, TESTED_SAMPLES):
        raise NotBatchable(
            f"a sample takes {store.row_bytes} bytes, and hardly any fits into the {options.memory.remaining_bytes} that are left"
        )
    contents = DatasetState(copy)
    for index, sample in samples.items():
        refetched = fetch(index)
        if not same_states(before, states(rngs)):
            raise NotBatchable("fetching a sample draws random numbers")
        torch.rand(1, device="cpu")  # a different generator state each time
        before = states(rngs)
        if index < store.rows:
            store.put([index], [sample])
            if not store.holds(index, refetched):
                raise NotBatchable("a sample is not the same each time it is fetched")
    if contents.changed():
        raise NotBatchable("the data set changes each time a sample is fetched")
    options.memory.remaining_bytes -= store.bytes
    return store
