"""Group the loader's batches into effective batches, and split them into micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flatout.loop.batches import size_of
from flatout.schema.errors import LoopError


def windows(batches: Iterable[Any], effective: int | None) -> Iterator[list[tuple[Any, int]]]:
    """Yields lists of (batch, samples), one list per optimizer step.

    Without ``effective``, each batch is alone.

    The last window of an epoch may be shorter. Raises LoopError if the loader's batches do not add up to the
    effective batch.
    """
    window: list[tuple[Any, int]] = []
    filled = 0
    for batch in batches:
        size = size_of(batch)
        if effective is None:
            yield [(batch, size)]
            continue
        if filled + size > effective:
            loaders = window[0][1] if window else size
            near = sorted({effective // loaders * loaders or loaders, (effective // loaders + 1) * loaders})
            raise LoopError(
                f"effective_batch={effective} is not a multiple of the loader's batches of {loaders} samples. "
                f"Use {' or '.join(map(str, near))}, or change the loader's batch_size."
            )
        window.append((batch, size))
        filled += size
        if filled == effective:
            yield window
            window, filled = [], 0
    if window:
        yield window


def cut(size: int, micro_batch: int | None) -> list[int]:
    """The sizes of the micro-batches of a batch, as even as possible.

    10 samples in parts of at most 4 give 4, 3, 3.
    """
    if micro_batch is None or size <= micro_batch:
        return [size]
    parts = -(-size // micro_batch)
    small, more = divmod(size, parts)
    return [small + 1] * more + [small] * (parts - more)
